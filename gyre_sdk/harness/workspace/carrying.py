"""Shell code that carries a shell's state from one command to the next, each in a process of its own.

A command is sourced between two acts: the state of the last one is read from a file before, and written after, also when the
command exits or makes the shell exit. So nothing that a command does to its shell's input, output or life can reach the
next one: a command that is killed, or that the shell cannot parse, leaves the state as it was.

Carried are the working directory, variables, exports, arrays (bash), functions, aliases, options and the umask; not traps,
redirections, jobs and limits. `sh` cannot print functions: there, those are carried that a command's own text defines.
"""

from __future__ import annotations

import re
import shlex

LIBRARY_BASH = r"""
__gyre_save() {
  __gyre_r=$?
  [ -n "$__gyre_ran" ] || return $__gyre_r
  __gyre_ran=
  {
    builtin echo '__gyre_options() { __gyre_ran=1'
    builtin set +o
    builtin shopt -p || builtin :
    builtin echo '}'
    builtin set +efux
    builtin echo 'builtin shopt -s extglob'
    builtin declare -p IFS || builtin echo 'builtin unset IFS'
    builtin unset IFS
    for __gyre_v in $(builtin compgen -v); do
      case $__gyre_v in
        IFS|PWD|OLDPWD|SHLVL|EUID|UID|PPID|DIRSTACK|FUNCNAME|GROUPS|PIPESTATUS|LINENO|SECONDS|RANDOM|SRANDOM|_) ;;
        BASH|BASH[_OP]*|SHELLOPTS|EPOCH*|COMP_*|HISTCMD|OPT[EI]*|GYRE_*|__gyre_*) ;;
        *) builtin declare -p "$__gyre_v" 2>/dev/null ;;
      esac
    done
    builtin declare -F | while IFS=' ' builtin read -r __gyre_v __gyre_k __gyre_n; do
      case $__gyre_n in __gyre_*) continue ;; esac
      builtin declare -f "$__gyre_n"
      case $__gyre_k in *x*) builtin printf 'builtin export -f %q\n' "$__gyre_n" ;; esac
    done
    builtin alias -p
    builtin echo "builtin umask $(builtin umask)"
    builtin printf 'builtin cd -- %q\n' "$PWD"
    [ -z "${OLDPWD+x}" ] || builtin declare -p OLDPWD
  } >"$__gyre_s.new"
  ( PATH="/usr/local/bin:/usr/bin:/bin:$PATH"; exec mv -f "$__gyre_s.new" "$__gyre_s" )
  return $__gyre_r
}
if [ -r "$__gyre_s" ]; then
  for __gyre_v in $(compgen -e); do
    case $__gyre_v in GYRE_*|PWD) ;; *) unset "$__gyre_v" ;; esac
  done
  . "$__gyre_s"
else
  __gyre_options() { __gyre_ran=1; }
fi
"""

LIBRARY_SH = r"""
__gyre_save() {
  set -- $? "$GYRE_EXEC_ID" "$__gyre_s" "${__gyre_new-}" "${IFS+x}" "${IFS-}"
  [ -n "${__gyre_ran-}" ] || return $1
  {
    echo '__gyre_options() { __gyre_ran=1'
    set +o
    echo '}'
    set +efux
    unset IFS
    __gyre_names=${__gyre_names-}
    eval "$4"
    __gyre_kept=
    for __gyre_n in $__gyre_names; do
      case $(command -V "$__gyre_n" 2>/dev/null) in
        *function*) __gyre_kept="$__gyre_kept $__gyre_n" ;;
        *) unset "__gyre_f_$__gyre_n" ;;
      esac
    done
    __gyre_names=$__gyre_kept __gyre_pwd=$PWD
    [ -z "$5" ] || IFS=$6
    unset __gyre_ran __gyre_s __gyre_new __gyre_n __gyre_kept GYRE_EXEC_ID
    set
    export -p
    readonly -p
    alias | while IFS= read -r __gyre_n; do
      case $__gyre_n in alias\ *) printf '%s\n' "$__gyre_n" ;; *) printf 'alias %s\n' "$__gyre_n" ;; esac
    done
    echo "umask $(umask)"
  } >"$3.new"
  ( PATH="/usr/local/bin:/usr/bin:/bin:$PATH"; exec mv -f "$3.new" "$3" )
  return $1
}
if [ -r "$__gyre_s" ]; then
  while IFS= read -r __gyre_n; do
    case $__gyre_n in export\ *=*) __gyre_n=${__gyre_n#export }; __gyre_n=${__gyre_n%%=*} ;; *) __gyre_n= ;; esac
    case $__gyre_n in GYRE_*|PWD|*[!A-Za-z0-9_]*|'') ;; *) unset "$__gyre_n" ;; esac
  done <<__gyre_end
$(export -p)
__gyre_end
  set -- "$GYRE_EXEC_ID" "$__gyre_s" "${__gyre_new-}"
  . "$__gyre_s"
  GYRE_EXEC_ID=$1 __gyre_s=$2 __gyre_new=$3
  export GYRE_EXEC_ID
  set -- "${IFS+x}" "${IFS-}"
  unset IFS
  for __gyre_n in $__gyre_names; do eval "eval \"\${__gyre_f_$__gyre_n}\""; done
  [ -z "$1" ] || IFS=$2
  set --
  command cd -- "$__gyre_pwd"
else
  __gyre_options() { __gyre_ran=1; }
fi
"""

_RUN = r"""
trap '{ __gyre_save; } 2>/dev/null' EXIT
{ __gyre_options; . "$__gyre_s.cmd" 2>&8 8>&-; __gyre_save; } 8>&2 2>/dev/null
exit
"""
_FUNCTION = re.compile(
    r"(?:^|[;&|({\n]|\b(?:then|do|else)\s)[ \t]*(?:function[ \t]+)?([A-Za-z_]\w*)[ \t]*\(\s*\)\s*(?=[{(])"
)
_HEREDOC = re.compile(r"<<(-?)[ \t]*(?:'([^'\n]+)'|\"([^\"\n]+)\"|\\?([^\s;&|<>()'\"]+))")
_PLAIN = re.compile(r"[^\s'\"\\`#<{}()$]+|\s")


def library(shell: str) -> str:
    """Return what every command of a shell sources first."""
    return (LIBRARY_BASH if shell.endswith("bash") else LIBRARY_SH) + _RUN


def carried(cmd: str, state: str, shell: str) -> str:
    """Return code that runs `cmd` with the state kept below the path `state`, where its library is too."""
    code = f"__gyre_s={shlex.quote(state)}\n"
    found = {} if shell.endswith("bash") else functions_in(cmd)
    if found:
        learn = "".join(
            f'__gyre_names="$__gyre_names {name}" __gyre_f_{name}={shlex.quote(text)}\n'
            f'( eval "$__gyre_f_{name}" ) >/dev/null 2>&1 || unset __gyre_f_{name}\n'
            for name, text in found.items()
        )
        code += f"__gyre_new={shlex.quote(learn)}\n"
    text = shlex.quote(f"{cmd}\n")
    return code + f'printf %s {text} >"$__gyre_s.cmd"\n. "$__gyre_s.lib"\n'


def functions_in(cmd: str) -> dict[str, str]:
    """Return the functions that a command's text defines at any place: name -> definition. A definition that is cut wrongly is
    found out when it is tried."""
    found = {}
    for match in _FUNCTION.finditer(cmd):
        end = _body_end(cmd, match.end())
        if end is not None:
            found[match[1]] = f"{match[1]}() {cmd[match.end() : end]}"
    return found


def _body_end(text: str, at: int) -> int | None:
    """Return the index behind the compound command, braces or a subshell, that starts at `at`; None when it does not end."""
    opening, closing = text[at], {"{": "}", "(": ")"}[text[at]]
    depth = 0
    waiting: list[tuple[str, bool]] = []
    while at < len(text):
        char = text[at]
        if char == "\\":
            at += 2
        elif char == "'":
            at = text.find("'", at + 1) + 1 or len(text)
        elif char in '"`':
            at = _quoted_end(text, at)
        elif char == "#" and text[at - 1].isspace():
            at = _line_end(text, at)
        elif char == "\n" and waiting:
            at = _skip_heredocs(text, at + 1, waiting)
            waiting = []
        elif text.startswith("<<", at) and (here := _HEREDOC.match(text, at)):
            waiting.append((here[2] or here[3] or here[4], here[1] == "-"))
            at = here.end()
        elif text.startswith("${", at):
            at = text.find("}", at) + 1 or len(text)
        elif char == opening:
            depth += 1
            at += 1
        elif char == closing:
            depth -= 1
            at += 1
            if depth == 0:
                return at
        else:
            plain = _PLAIN.match(text, at)
            at = plain.end() if plain and not waiting else at + 1
    return None


def _line_end(text: str, at: int) -> int:
    end = text.find("\n", at)
    return end if end >= 0 else len(text)


def _quoted_end(text: str, at: int) -> int:
    quote = text[at]
    at += 1
    while at < len(text) and text[at] != quote:
        at += 2 if text[at] == "\\" else 1
    return at + 1


def _skip_heredocs(text: str, at: int, waiting: list[tuple[str, bool]]) -> int:
    for word, tabs in waiting:
        while at < len(text):
            end = _line_end(text, at)
            line, at = text[at:end], end + 1
            if (line.lstrip("\t") if tabs else line) == word:
                break
    return at
