"""The supervisor that runs inside a workspace: POSIX shell, so that an image needs nothing else.

Protocol. The controller writes requests to its standard input, each a line and that many lines of shell code::

    R <id> <lines> 0        run the code in a subshell of its own (it calls `launch`); answers are events
    S <id> <lines> 0        run the code in the main loop; its output is the answer, ended by `=<nonce> <id> <status>`
    T <id> <lines> <blocks> as S, with that many 10,240-byte blocks of raw data after the code as its standard input

Events go to standard error, one short (hence atomic) line each: `@<nonce> ready ...`, `@<nonce> exit <id> <status>`,
`@<nonce> wrapper <id> <pid>`, `@<nonce> done <id> <any output>` (both outputs reached their end), `@<nonce> fail <id> <why>`. Binary answers are base64,
so nothing that happens to a file while it is sent can shift the protocol.

The supervisor runs as the agent's user and is trusted with nothing: before scoring it is replaced by a new one, whose first
act is to kill every other process of that user (`kill -9 -1` is one atomic walk in the kernel, which no fork outruns), and
which then looks for survivors in /proc.

Output of a command goes through pipes, so that it cannot outgrow memory: `dd` copies at most 1 MiB into a chunk file; the
first chunks and the last ones are kept. A background child that still holds a pipe keeps a reader that throws its output
away, so that it is neither blocked nor killed by a closed pipe.
"""

from __future__ import annotations

BLOCK = 10_240
"""Bytes per block of raw data after the code of a `T` request: a tar record."""

BOOTSTRAP = r"""c=
while IFS= read -r l; do case $l in '#end') break;; esac; c="$c$l
"; done
eval "$c"
"""
"""What the supervisor is started with: reads `SUPERVISOR` from its input, so that process lists stay readable."""

SUPERVISOR = r"""
N=$1 D=$2 CAP=$3 HOW=$4 KEEP=$5 W=$6
umask 022
NL='
'
say() { printf '@%s %s\n' "$N" "$*" >&2; }
has_env() {
  while IFS= read -r ev || [ -n "$ev" ]; do
    case $ev in *"$2"*) return 0;; esac
  done 2>/dev/null </proc/$1/environ
  return 1
}
others() {
  left=
  for p in /proc/[0-9]*; do
    p=${p#/proc/}
    case " 1 $KEEP $$ " in *" $p "*) continue;; esac
    if [ "$HOW" = marked ]; then has_env "$p" "GYRE_WORKSPACE=$W." || continue; fi
    { IFS= read -r st </proc/$p/stat; } 2>/dev/null || continue
    case ${st##*) } in Z*|X*) continue;; esac
    left="$left $p"
  done
}
kill_others() {
  k=0
  while [ $k -lt 40 ]; do
    if [ "$HOW" = user ]; then kill -9 -1; else others; [ -z "$left" ] || kill -9 $left; fi 2>/dev/null
    others
    [ -z "$left" ] && return 0
    k=$((k+1))
    [ $k -gt 3 ] && sleep 0.02
  done
  return 1
}
kill_marked() {
  leader=none
  [ -e "$D/$1.pid" ] && IFS= read -r leader <"$D/$1.pid"
  k=0
  while [ $k -lt 4 ]; do
    hit=
    for p in /proc/[0-9]*; do
      p=${p#/proc/}
      case " 1 $KEEP $$ " in *" $p "*) continue;; esac
      { IFS= read -r st </proc/$p/stat; } 2>/dev/null || continue
      set -- "$1" ${st##*) }
      case $2 in Z*|X*) continue;; esac
      if [ "$5" = "$leader" ] || has_env "$p" "GYRE_EXEC_ID=$1.$W."; then kill -9 $p 2>/dev/null && hit=1; fi
    done
    [ -z "$hit" ] && return 0
    k=$((k+1))
  done
  return 1
}
chunks() {
  n=100000 b=0 h=0 t=0 lost=0
  while :; do
    LC_ALL=C dd bs=32768 count=32 of="$1.$n" 2>"$1.log" || { echo x >"$1.bad"; exec cat >/dev/null; }
    r=32
    while IFS=' ' read -r r l; do case $l in 'records in') break;; esac; done <"$1.log"
    case $r in *[!0-9+]*|'') echo x >"$1.bad"; exec cat >/dev/null;; esac
    [ $(($r)) -lt 32 ] && return
    [ -e "$D/$id.s" ] || exec cat >/dev/null
    s=$(stat -c %s "$1.$n")
    if [ $h -lt $CAP ]; then
      h=$((h+s)) b=$((n+1))
    else
      t=$((t+s))
      while [ $b -lt $n ]; do
        s=$(stat -c %s "$1.$b")
        [ $((t-s)) -lt $CAP ] && break
        rm -f "$1.$b"
        t=$((t-s)) lost=$((lost+s)) b=$((b+1))
        echo $lost >"$1.lost"
      done
    fi
    n=$((n+1))
  done 2>/dev/null
}
launch() {
  mkfifo "$D/$id.of" "$D/$id.ef" 2>/dev/null || { say fail "$id" room; return; }
  chunks "$D/$id.o" <"$D/$id.of" &
  chunks "$D/$id.e" <"$D/$id.ef" &
  GYRE_EXEC_ID=$id.$W. setsid "$@" <"$in" >"$D/$id.of" 2>"$D/$id.ef" &
  c=$!
  echo $c >"$D/$id.pid"
  wait $c
  say exit "$id" $?
  wait
  if [ -s "$D/$id.o.100000" ] || [ -s "$D/$id.e.100000" ]; then say done "$id" 1; else say done "$id" 0; fi
}
collect() {
  for s in o e; do
    lost=0
    [ -e "$1.$s.lost" ] && IFS= read -r lost <"$1.$s.lost"
    [ -e "$1.$s.bad" ] && lost=bad
    echo "$lost"
    for f in "$1.$s".1*; do [ -s "$f" ] && base64 "$f" 2>/dev/null && echo -; done
    echo .
  done
  rm -rf "$1".* &
}
state() {
  IFS= read -r st </proc/$$/stat
  set -- ${st##*) }
  echo "nice ${17} policy ${39}"
  cat /proc/$$/limits /proc/$$/oom_score_adj /proc/$$/cgroup
  grep -E '^(Sig(Blk|Ign|Cgt)|Cpus_allowed|Mems_allowed|NoNewPrivs|Seccomp|TracerPid)' /proc/$$/status
}
SH=/bin/sh
[ -x /bin/bash ] && SH=/bin/bash
guard=open
if [ "$HOW" = user ] && ! [ -r /proc/$$/environ ]; then guard=guarded; fi
missing=
for t in setsid mkfifo dd base64 tar mkdir rm cat stat sleep; do command -v $t >/dev/null 2>&1 || missing="$missing $t"; done
[ -n "$missing" ] && { say unfit "$missing"; exit 1; }
if [ "$KEEP" = first ]; then KEEP=; others; KEEP=$left; else kill_others; others; fi
mkdir -p "$D" || { say unfit " a writable $D"; exit 1; }
STATE=$(state 2>/dev/null)
say ready $$ "$SH" $guard "keep:$KEEP" "left:$left"
while IFS=' ' read -r verb id k blocks; do
  code=
  while [ "$k" -gt 0 ]; do IFS= read -r l || exit; code="$code$l$NL" k=$((k-1)); done
  case $verb in
  R) ( in=/dev/null; eval "$code" ) </dev/null & say wrapper "$id" $! ;;
  S) eval "$code" </dev/null; echo "=$N $id $?" ;;
  T) dd bs=10240 count="$blocks" iflag=fullblock 2>/dev/null | { eval "$code"; r=$?; cat >/dev/null; exit $r; }; echo "=$N $id $?" ;;
  esac
done
#end
"""
