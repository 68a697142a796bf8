"""The supervisor that runs inside a workspace: POSIX shell, so that an image needs nothing else.

Protocol. Its own code comes on its standard input, so that no process list shows it, and begins with a nonce that nothing else
inside gets to know. A shell may read further ahead than its code: only once it said `ready` come requests, each a line and that
many lines of shell code::

    R <id> <lines> 0        run the code in a subshell of its own (it calls `launch`); answers are events
    S <id> <lines> 0        run the code in the main loop; its output is the answer, ended by `\n=<nonce> <id> <status>`
    T <id> <lines> <blocks> as S, with that many 10,240-byte blocks of raw data after the code as its standard input

Answers are raw bytes: only the nonce ends one, so nothing that happens to a file while it is sent can shift the protocol.
Events go to standard error, one short (hence atomic) line each::

    @<nonce> ready <pid> <shell> <open or guarded> <whole or bare> keep:<pids> left:<pids>
    @<nonce> started <id> <pid> <leader>    the process that will report the command's end, and the command's first one
    @<nonce> exit <id> <status> <kills>     the command ended; processes of the workspace killed for memory meanwhile
    @<nonce> done <id> <any output>         both outputs reached their end; a launcher sends them along where they are short
    @<nonce> fail <id> <why>                it was not started: `cwd` or `room`
    @<nonce> unfit <missing tools>          no command can be run here

A supervisor that was told it may be bare starts even where tools are missing: it kills and answers with what the shell itself
has, and cannot launch.

The supervisor runs as the agent's user and is trusted with nothing: before scoring it is replaced by a new one, whose first
act is to kill every other process of that user (`kill -9 -1` is one atomic walk in the kernel, which no fork outruns), and
which then looks for survivors in /proc.

Output of a command goes through pipes, so that it cannot outgrow memory: `dd` copies at most 1 MiB into a chunk file; the
first chunks and the last ones are kept. A background child that still holds a pipe keeps a reader that throws its output
away, so that it is neither blocked nor killed by a closed pipe. The files of a command have the name of a slot, which the
controller uses again once all of that command has ended: short outputs need no removal.

Where the controller has brought a launcher (launcher.c), as a format of `printf`, that does all this in one process. Its events
carry a mark of the command instead of the nonce, which nothing that can be looked into ever holds.
"""

from __future__ import annotations

import string
from functools import cache

BLOCK = 10_240
"""Bytes per block of raw data after the code of a `T` request: a tar record."""

SUPERVISOR = r"""
D=$1 CAP=$2 HOW=$3 KEEP=$4 W=$5 T=$6 BARE=$7 AGAIN=$8
P=
[ -z "$T" ] || P=$PATH PATH=$T:$PATH
umask 022
NL='
'
exec 5>&2
say() { printf '@%s %s\n' "$N" "$*" >&5; }
has_env() {
  while IFS= read -r ev || [ -n "$ev" ]; do
    case $ev in *"$2"*) return 0;; esac
  done 2>/dev/null </proc/$1/environ
  return 1
}
others() {
  left= deep=
  for p in /proc/[0-9]*; do
    p=${p#/proc/}
    case " 1 $KEEP $$ " in *" $p "*) continue;; esac
    if [ "$HOW" = marked ]; then has_env "$p" "GYRE_WORKSPACE=$W." || continue; fi
    { IFS= read -r st </proc/$p/stat; } 2>/dev/null || continue
    case ${st##*) } in Z*|X*) continue;; D*) deep="$deep $p";; esac
    left="$left $p"
  done
}
kill_others() {
  k=0
  while [ $k -lt 150 ] || { [ $k -lt 300 ] && [ "$left" = "$deep" ]; }; do  # what waits for a disk dies once that answers
    if [ "$HOW" = user ]; then kill -9 -1; else others; [ -z "$left" ] || kill -9 $left; fi 2>/dev/null
    others
    [ -z "$left" ] && return 0
    k=$((k+1))
    [ $k -lt 150 ] || sleep 0.2
    [ $k -gt 3 ] && sleep 0.02
  done
  return 1
}
kill_marked() {
  leader=$2 k=0
  while [ $k -lt 20 ]; do
    hit=
    for p in /proc/[0-9]*; do
      p=${p#/proc/}
      case " 1 $KEEP $$ " in *" $p "*) continue;; esac
      { IFS= read -r st </proc/$p/stat; } 2>/dev/null || continue
      set -- "$1" ${st##*) }
      case $2 in Z*|X*) continue;; esac
      if [ "$5" = "$leader" ] || has_env "$p" "GYRE_EXEC_ID=$1.$W."; then hit="$hit $p"; fi
    done
    [ -z "$hit" ] && return 0
    { kill -STOP $hit; kill -9 $hit; } 2>/dev/null  # halted first, so that no shell gets to tell of its children's end
    k=$((k+1))
    [ $k -lt 3 ] || sleep 0.02
  done
  return 1
}
chunks() {
  n=100000 b=0 h=0 t=0 lost=0
  while :; do
    LC_ALL=C dd bs=8192 count=128 of="$1.$n" 2>"$1.log" || { echo x >"$1.bad"; exec cat >/dev/null; }
    r=
    while IFS=' ' read -r r l; do case $l in 'records in') break;; esac; done <"$1.log"
    case $r in *[!0-9+]*|'') echo x >"$1.bad"; exec cat >/dev/null;; esac
    [ $(($r)) -lt 128 ] && return
    [ -e "$1.100000" ] || exec cat >/dev/null
    s=$(wc -c <"$1.$n")
    if [ $h -lt $CAP ]; then
      h=$((h+s)) b=$((n+1))
    else
      t=$((t+s))
      eval "size$n=$s"
      while [ $b -lt $n ]; do
        eval "s=\$size$b"
        [ $((t-s)) -lt $CAP ] && break
        rm -f "$1.$b"
        unset "size$b"
        t=$((t-s)) lost=$((lost+s)) b=$((b+1))
        echo $lost >"$1.lost"
      done
    fi
    n=$((n+1))
  done 2>/dev/null
}
killed() {
  kills=0
  while IFS=' ' read -r k v; do
    [ "$k" = oom_kill ] && kills=$v
  done 2>/dev/null <"$MEMORY"
}
launch() {
  f=$D/$2
  : >"$f.o.100000"
  : >"$f.e.100000"
  if [ -n "$L" ] && [ -x "$L" ]; then
    [ -z "$P" ] || PATH=$P
    set -- "$L" "$1" "$f" "$CAP" "${4:-/dev/null}" "$MEMORY" "$W." "$3" "$5"
    enter  # from here on a variable may hold what the command is given by that name
    exec "$1" "$2" "$3" "$4" "$5" 150 "$6" "$7" "$8" >/dev/null 3<<END
$9
END
  fi
  {
    {
      cd -P /proc/self && self=${PWD#/proc/}
      killed
      before=$kills
      (
        [ -z "$P" ] || PATH=$P
        set -- "$SETSID" "$3" "$f.s" "${4:-/dev/null}" "$1.$W."
        enter
        export GYRE_EXEC_ID="$5"
        exec "$1" "$2" "$3" <"$4" >&4 2>&6 4>&- 5>&- 6>&-
      ) &
      say started "$1" "$self $!"
      wait $!
      status=$?
      killed
      say exit "$1" "$status $((kills-before))"
    } 6>&1 >/dev/null | chunks "$f.e" >/dev/null 4>&-
  } 4>&1 | chunks "$f.o" >/dev/null
  if [ -s "$f.o.100000" ] || [ -s "$f.e.100000" ]; then say done "$1" 1; else say done "$1" 0; fi
}
equip() {
  L=
  f=$D/launcher
  if [ -e "$f" ] || [ -L "$f" ]; then rm -rf "$f"; fi
  [ "$BARE" = whole ] && [ -n "$B" ] && printf "$B" >"$f" && chmod 700 "$f" || return 0
  [ "$("$f" check)" != ok ] || L=$f
} 2>/dev/null
collect() {
  f=$D/$1
  for s in o e; do
    lost=0
    [ -e "$f.$s.lost" ] && IFS= read -r lost <"$f.$s.lost"
    [ -e "$f.$s.bad" ] && lost=bad
    echo "$lost"
    [ -s "$f.$s.100000" ] && cat "$f.$s".1*
    printf '\n~%s\n' "$N"
    if [ "$lost" != 0 ] || [ -e "$f.$s.100001" ]; then set -- "$1" drop; fi
  done 2>/dev/null
  if [ "$2" = drop ]; then rm -rf "$f".*; fi
}
state() {
  IFS= read -r st </proc/$$/stat
  set -- ${st##*) }
  echo "nice ${17} policy ${39}"
  for f in limits oom_score_adj cgroup status; do
    while IFS= read -r l; do
      case $f.$l in
      status.SigBlk*|status.SigIgn*|status.SigCgt*|status.Cpus_allowed*|status.Mems_allowed*) echo "$l";;
      status.NoNewPrivs*|status.Seccomp*|status.TracerPid*|[!s]*) echo "$l";;
      esac
    done </proc/$$/$f
  done
}
SH=/bin/sh
[ -x /bin/bash ] && SH=/bin/bash
[ -x $SH ] || { [ -n "$T" ] && SH=$T/sh P=$P:$T; }
guard=open
if [ "$HOW" = user ] && ! [ -r /proc/$$/environ ]; then guard=guarded; fi
missing=
for t in setsid dd tar mkdir rm cat wc sleep; do command -v $t >/dev/null 2>&1 || missing="$missing $t"; done
[ -n "$missing" ] && [ -z "$BARE" ] && { say unfit "$missing"; exit 1; }
if [ "$KEEP" = first ]; then KEEP=; others; KEEP=$left; else kill_others; others; fi
if [ -n "$missing" ]; then
  D=${D%/*} BARE=bare
else
  BARE=whole
  mkdir -m 700 -p "$D" || { say unfit " a writable $D"; exit 1; }
fi
SETSID=setsid IFS=:
for t in $PATH; do
  [ -x "$t/setsid" ] && { SETSID=$t/setsid; break; }
done
unset IFS
MEMORY=/dev/null
for m in /sys/fs/cgroup/memory.events /sys/fs/cgroup/memory/memory.oom_control; do
  [ "$HOW" != marked ] && [ -r $m ] && MEMORY=$m
done
STATE=
[ -z "$AGAIN" ] || STATE=$(state 2>/dev/null)
{  # read to its end before any of it runs, and so before the first request is sent
say ready $$ "$SH" $guard $BARE "keep:$KEEP" "left:$left"
equip
while IFS=' ' read -r verb id k blocks; do
  code=
  while [ "$k" -gt 0 ]; do IFS= read -r l || exit; code="$code$l$NL" k=$((k-1)); done
  case $verb in
  R) ( eval "$code" ) </dev/null & ;;
  S) eval "$code" </dev/null; printf '\n=%s %s %s\n' "$N" "$id" $? ;;
  T)
    dd bs=10240 count="$blocks" iflag=fullblock 2>/dev/null | { eval "$code"; r=$?; cat >/dev/null; exit $r; }
    printf '\n=%s %s %s\n' "$N" "$id" $?
  ;;
  esac
done
exit
}
"""

_PLAIN = frozenset((string.ascii_letters + string.punctuation + " ").encode()) - frozenset(b"\\%'")
"""Bytes that a format in single quotes may hold as they are: no digits, which would continue an octal number."""


def source(nonce: str, launcher: bytes | None) -> bytes:
    """Return what a supervisor's shell reads to become one. Variables of the image with these names would be exported: unset.

    Args:
        launcher: is used where it runs; None: the supervisor launches by itself.
    """
    return f"unset N B\nN={nonce} B='{_printed(launcher or b'')}'\n{SUPERVISOR}".encode()


@cache
def _printed(data: bytes) -> str:
    return "".join(chr(byte) if byte in _PLAIN else f"\\{byte:o}" for byte in data)
