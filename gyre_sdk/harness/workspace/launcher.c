/* Runs one command of a workspace: what the functions `launch` and `chunks` of the supervisor (script.py) do with eight
 * processes, by itself. Optional: compiled where a C compiler is at hand, tried inside before it is used. It needs no library,
 * so that it runs in any image of its architecture.
 *
 *     launcher <id> <slot path> <bytes of head and of tail> <input path> <hold ms> <memory events path> <marker> <shell>
 *
 * It reads the mark of its events from descriptor 3 and writes them to descriptor 5, as the supervisor does. Outputs that are
 * short together go with the event `done` itself, base64 apart; longer ones into the slot's files. `launcher check` prints ok.
 */
typedef unsigned long usize;
typedef long isize;
typedef unsigned char byte;

enum { HELD = 65536, INLINE = 2600, LINE = 4000, PATH = 4096, MARK = 128 };

#if defined(__x86_64__)
enum { NR_READ = 0, NR_WRITE = 1, NR_CLOSE = 3, NR_MMAP = 9, NR_FCNTL = 72, NR_DUP3 = 292, NR_PIPE2 = 293, NR_OPENAT = 257,
       NR_CLONE = 56, NR_EXECVE = 59, NR_EXIT = 231, NR_WAIT4 = 61, NR_SETSID = 112, NR_GETPID = 39, NR_PPOLL = 271,
       NR_SIGNALFD4 = 289, NR_SIGPROCMASK = 14, NR_PRCTL = 157, NR_CLOCK = 228 };
static isize call(isize n, isize a, isize b, isize c, isize d, isize e, isize f) {
  isize result;
  register isize r10 __asm__("r10") = d;
  register isize r8 __asm__("r8") = e;
  register isize r9 __asm__("r9") = f;
  __asm__ volatile("syscall" : "=a"(result) : "a"(n), "D"(a), "S"(b), "d"(c), "r"(r10), "r"(r8), "r"(r9)
                   : "rcx", "r11", "memory");
  return result;
}
__asm__(".globl _start\n_start:\n  xor %ebp, %ebp\n  mov %rsp, %rdi\n  and $-16, %rsp\n  call enter\n");
#elif defined(__aarch64__)
enum { NR_READ = 63, NR_WRITE = 64, NR_CLOSE = 57, NR_MMAP = 222, NR_FCNTL = 25, NR_DUP3 = 24, NR_PIPE2 = 59, NR_OPENAT = 56,
       NR_CLONE = 220, NR_EXECVE = 221, NR_EXIT = 94, NR_WAIT4 = 260, NR_SETSID = 157, NR_GETPID = 172, NR_PPOLL = 73,
       NR_SIGNALFD4 = 74, NR_SIGPROCMASK = 135, NR_PRCTL = 167, NR_CLOCK = 113 };
static isize call(isize n, isize a, isize b, isize c, isize d, isize e, isize f) {
  register isize x8 __asm__("x8") = n;
  register isize x0 __asm__("x0") = a;
  register isize x1 __asm__("x1") = b;
  register isize x2 __asm__("x2") = c;
  register isize x3 __asm__("x3") = d;
  register isize x4 __asm__("x4") = e;
  register isize x5 __asm__("x5") = f;
  __asm__ volatile("svc #0" : "+r"(x0) : "r"(x8), "r"(x1), "r"(x2), "r"(x3), "r"(x4), "r"(x5) : "memory");
  return x0;
}
__asm__(".globl _start\n_start:\n  mov x29, #0\n  mov x0, sp\n  bl enter\n");
#else
#error "no system calls for this architecture"
#endif

#define CALL1(n, a) call(n, (isize)(a), 0, 0, 0, 0, 0)
#define CALL2(n, a, b) call(n, (isize)(a), (isize)(b), 0, 0, 0, 0)
#define CALL3(n, a, b, c) call(n, (isize)(a), (isize)(b), (isize)(c), 0, 0, 0)
#define CALL5(n, a, b, c, d, e) call(n, (isize)(a), (isize)(b), (isize)(c), (isize)(d), (isize)(e), 0)

void *memcpy(void *to, const void *from, usize size) {
  for (usize i = 0; i < size; i++) ((byte *)to)[i] = ((const byte *)from)[i];
  return to;
}
void *memset(void *to, int value, usize size) {
  for (usize i = 0; i < size; i++) ((byte *)to)[i] = (byte)value;
  return to;
}

static usize length(const char *text) {
  usize n = 0;
  while (text[n]) n++;
  return n;
}
static usize number(const char *text) {
  usize n = 0;
  while (*text >= '0' && *text <= '9') n = n * 10 + (usize)(*text++ - '0');
  return n;
}
static char *put(char *to, const char *text) {
  while (*text) *to++ = *text++;
  return to;
}
static char *put_number(char *to, usize n) {
  char digits[24];
  int count = 0;
  do digits[count++] = (char)('0' + n % 10); while (n /= 10);
  while (count) *to++ = digits[--count];
  return to;
}
static isize now_ms(void) {
  isize at[2];
  CALL2(NR_CLOCK, 1, at);
  return at[0] * 1000 + at[1] / 1000000;
}
static int write_all(int fd, const byte *data, usize size) {
  while (size) {
    isize n = CALL3(NR_WRITE, fd, data, size);
    if (n == -4) continue; /* interrupted */
    if (n <= 0) return 0;
    data += n;
    size -= (usize)n;
  }
  return 1;
}

static char mark[MARK], line[LINE];
static const char *id, *slot;

static char *event(const char *name) {
  return put(put(put(put(put(put(line, "@"), mark), " "), name), " "), id);
}
static void say(char *end) {
  *end++ = '\n';
  CALL3(NR_WRITE, 5, line, end - line);
}

/* The first `half` bytes and the last `half` bytes of a stream; `total` counts all. */
struct capture {
  byte *head, *tail;
  usize half, total;
  int fd, open;
};
static void take(struct capture *c, const byte *data, usize size) {
  if (c->total < c->half) {
    usize room = c->half - c->total, n = size < room ? size : room;
    memcpy(c->head + c->total, data, n);
    c->total += n, data += n, size -= n;
  }
  if (size > c->half) {
    c->total += size - c->half;
    data += size - c->half;
    size = c->half;
  }
  while (size) {
    usize at = (c->total - c->half) % c->half, n = c->half - at < size ? c->half - at : size;
    memcpy(c->tail + at, data, n);
    c->total += n, data += n, size -= n;
  }
}
static usize lost(const struct capture *c) { return c->total > 2 * c->half ? c->total - 2 * c->half : 0; }

static int create(const char *suffix) {
  char path[PATH];
  *put(put(path, slot), suffix) = 0;
  return (int)call(NR_OPENAT, -100, (isize)path, 01 | 0100 | 01000, 0600, 0, 0); /* write, create, truncate */
}
static void note(const char *suffix, usize n) {
  char text[32];
  int fd = create(suffix);
  if (fd < 0) return;
  char *end = put(put_number(text, n), "\n");
  write_all(fd, (byte *)text, (usize)(end - text));
  CALL1(NR_CLOSE, fd);
}
static void store(const struct capture *c, const char *file, const char *missing, const char *bad) {
  int fd = create(file), good = fd >= 0;
  if (good && c->total <= c->half) {
    good = write_all(fd, c->head, c->total);
  } else if (good) {
    usize beyond = c->total - c->half, kept = beyond < c->half ? beyond : c->half;
    usize at = beyond < c->half ? 0 : beyond % c->half;
    good = write_all(fd, c->head, c->half) && write_all(fd, c->tail + at, kept - at) && write_all(fd, c->tail, at);
  }
  if (fd >= 0) CALL1(NR_CLOSE, fd);
  if (lost(c)) note(missing, lost(c));
  if (!good) note(bad, 1);
}
static char *base64(char *to, const byte *from, usize size) {
  static const char digits[] = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
  *to++ = '.'; /* so that nothing is something */
  for (usize i = 0; i < size; i += 3) {
    unsigned group = (unsigned)from[i] << 16;
    if (i + 1 < size) group |= (unsigned)from[i + 1] << 8;
    if (i + 2 < size) group |= from[i + 2];
    *to++ = digits[group >> 18 & 63];
    *to++ = digits[group >> 12 & 63];
    *to++ = i + 1 < size ? digits[group >> 6 & 63] : '=';
    *to++ = i + 2 < size ? digits[group & 63] : '=';
  }
  return to;
}

/* Processes of the workspace that were killed for memory so far. */
static usize kills(const char *path) {
  char text[1024];
  int fd = (int)call(NR_OPENAT, -100, (isize)path, 0, 0, 0, 0);
  if (fd < 0) return 0;
  isize size = CALL3(NR_READ, fd, text, sizeof text - 1);
  CALL1(NR_CLOSE, fd);
  text[size > 0 ? size : 0] = 0;
  for (char *at = text; *at; at++) {
    const char *name = "oom_kill ";
    char *here = at;
    while (*name && *here == *name) here++, name++;
    if (!*name && (at == text || at[-1] == '\n')) return number(here);
  }
  return 0;
}

static void child(char **argv, char **envp, int out, int err, const char *input, const char *marker) {
  usize count = 0, none = 0;
  char path[PATH], variable[256];
  char *words[] = {argv[8], path, 0};
  static char *variables[16384];
  while (envp[count] && count < 16000) variables[count] = envp[count], count++;
  *put(put(put(put(variable, "GYRE_EXEC_ID="), id), "."), marker) = 0;
  variables[count] = variable;
  *put(put(path, slot), ".s") = 0;
  CALL1(NR_SETSID, 0);
  int in = (int)call(NR_OPENAT, -100, (isize)input, 0, 0, 0, 0);
  CALL3(NR_DUP3, in, 0, 0);
  CALL3(NR_DUP3, out, 1, 0);
  CALL3(NR_DUP3, err, 2, 0);
  if (in > 2) CALL1(NR_CLOSE, in);
  CALL1(NR_CLOSE, 3);
  CALL1(NR_CLOSE, 5);
  call(NR_SIGPROCMASK, 2, (isize)&none, 0, 8, 0, 0);
  isize failed = CALL3(NR_EXECVE, argv[8], words, variables);
  char said[PATH], *end = put(put(put(said, "setsid: cannot run "), argv[8]), "\n"); /* told as that program tells it */
  CALL3(NR_WRITE, 2, said, end - said);
  CALL1(NR_EXIT, failed == -2 ? 127 : 126);
}

struct waiting {
  int fd;
  short events, revents;
};

static int run(char **argv, char **envp) {
  static byte buffer[HELD];
  struct capture captures[2];
  int pipes[2][2];
  usize before, chld = 1ul << 16; /* SIGCHLD */
  id = argv[1], slot = argv[2];
  usize half = number(argv[3]), hold = number(argv[5]);
  if (length(slot) > PATH - 64 || length(argv[7]) > 100 || length(id) > 60 || !half) return 2;
  CALL2(NR_PRCTL, 4, 0); /* not dumpable: commands of the same user cannot look into it */
  isize size = CALL3(NR_READ, 3, mark, MARK - 1);
  while (size > 0 && (mark[size - 1] == '\n' || mark[size - 1] == 0)) size--;
  mark[size > 0 ? size : 0] = 0;
  CALL1(NR_CLOSE, 3);
  for (int i = 0; i < 2; i++) {
    struct capture *c = &captures[i];
    if (CALL2(NR_PIPE2, pipes[i], 02000000) < 0) return 2; /* closed at exec */
    CALL3(NR_FCNTL, pipes[i][0], 1031, 262144);            /* a larger pipe, where that is allowed */
    isize memory = call(NR_MMAP, 0, (isize)(2 * half), 3, 0x22, -1, 0); /* only what is used is counted */
    if (memory < 0 && memory > -4096) return 2;
    c->head = (byte *)memory, c->tail = c->head + half, c->half = half, c->total = 0;
    c->fd = pipes[i][0], c->open = 1;
  }
  call(NR_SIGPROCMASK, 0, (isize)&chld, 0, 8, 0, 0);
  int signals = (int)call(NR_SIGNALFD4, -1, (isize)&chld, 8, 02000000, 0, 0);
  if (signals < 0) return 2;
  before = kills(argv[6]);
  isize pid = CALL5(NR_CLONE, 17, 0, 0, 0, 0); /* fork */
  if (pid < 0) return 2;
  if (pid == 0) child(argv, envp, pipes[0][1], pipes[1][1], argv[4], argv[7]);
  CALL1(NR_CLOSE, pipes[0][1]);
  CALL1(NR_CLOSE, pipes[1][1]);
  char *end = put_number(put(event("started"), " "), (usize)CALL1(NR_GETPID, 0));
  say(put_number(put(end, " "), (usize)pid));

  isize ended = -1, told = 0;
  while (!told || captures[0].open || captures[1].open) {
    struct waiting waits[3] = {{captures[0].open ? captures[0].fd : -1, 1, 0},
                               {captures[1].open ? captures[1].fd : -1, 1, 0},
                               {ended < 0 ? signals : -1, 1, 0}};
    isize limit[2], left = ended >= 0 && !told ? ended + (isize)hold - now_ms() : -1;
    if (left < 0 && ended >= 0 && !told) left = 0;
    if (ended >= 0 && !captures[0].open && !captures[1].open) left = 0;
    limit[0] = left / 1000, limit[1] = left % 1000 * 1000000;
    CALL5(NR_PPOLL, waits, 3, left >= 0 ? limit : 0, 0, 8);
    for (int i = 0; i < 2; i++) {
      if (!waits[i].revents) continue;
      isize n = CALL3(NR_READ, captures[i].fd, buffer, HELD);
      if (n > 0 && !told) take(&captures[i], buffer, (usize)n);
      if (n == 0 || (n < 0 && n != -4 && n != -11)) captures[i].open = 0;
    }
    if (waits[2].revents) {
      int status = 0;
      CALL3(NR_READ, signals, buffer, 128);
      if (call(NR_WAIT4, pid, (isize)&status, 1, 0, 0, 0) == pid) {
        int code = status & 127 ? 128 + (status & 127) : status >> 8 & 255;
        ended = now_ms();
        end = put_number(put(event("exit"), " "), (usize)code);
        say(put_number(put(end, " "), kills(argv[6]) - before));
      }
    }
    if (ended < 0 || told) continue;
    if ((captures[0].open || captures[1].open) && now_ms() < ended + (isize)hold) continue;
    told = 1; /* what a background child still writes is thrown away from here on */
    usize total = captures[0].total + captures[1].total;
    end = put(event("done"), " ");
    if (total <= INLINE && !lost(&captures[0]) && !lost(&captures[1]) && captures[0].total <= half && captures[1].total <= half) {
      end = put(base64(end, captures[0].head, captures[0].total), " ");
      say(base64(end, captures[1].head, captures[1].total));
    } else {
      store(&captures[0], ".o.100000", ".o.lost", ".o.bad");
      store(&captures[1], ".e.100000", ".e.lost", ".e.bad");
      say(put(end, "1"));
    }
  }
  return 0;
}

__attribute__((used)) void enter(usize *stack) {
  usize argc = stack[0];
  char **argv = (char **)(stack + 1), **envp = argv + argc + 1;
  int status = 2;
  if (argc == 2) {
    status = CALL3(NR_WRITE, 1, "ok\n", 3) == 3 ? 0 : 1;
  } else if (argc == 9) {
    status = run(argv, envp);
  }
  CALL1(NR_EXIT, status);
  for (;;) {
  }
}
