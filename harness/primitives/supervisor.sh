# Runs one command and records how it ended. Run by bash; starts no program but the command's own bash.
#
# bash and not a plain sh, because job control without a terminal (set -m) gives the command a process group of its own
# ("kill 0" does not reach the supervisor), leaves SIGINT and SIGQUIT at their defaults in it (sh ignores them for "&"),
# and makes the shell say when a signal ended a job: "exit 137" and SIGKILL have the same $?.
#
# Known gap of output in files: a command that opens /dev/stdout or /dev/stderr anew ("> /dev/stderr") empties the file, as
# it would with any file; ">> /dev/stderr" and ">&2" do not. Opened for appending, so that what follows stays in place.
# The result says so where the file system can tell: see output_marks.py.
#
# stdin: one line "go" once the claim is ours, else end of file. fd 3: where the command's pid is told.
# $1 operation ID   $2 directory of the records   $3 working directory   $4 bash   $5 limit of a file's size in KiB
# $6 the command's text, or empty: it is in the file "command"
# $7 files of control groups to join, one a line   $8 processes and $9 KiB of address space within the sandbox, or empty
# $10 and on: bubblewrap and its arguments, or nothing. It runs between this and the command: see isolation.py.
# Dies by SIGKILL at a point where a test wants it: see harness/faults.py. "launcher.py" hands the order on.
reach() {
  [ -n "$UNREAL_AGENT_FAULT_KILL" ] || return 0
  local file=${UNREAL_AGENT_FAULT_KILL#@} order=
  { IFS= read -r order <"$file"; } 2>/dev/null
  [ "${order%%:*}" = "$1" ] || return 0
  set -C
  { echo "$2" >"$file.${order##*:}"; } 2>/dev/null && kill -KILL $$
  set +C
}
set -m
trap : HUP INT QUIT TERM PIPE
IFS= read -r go
if [ "$go" != go ]; then
  # Its launcher died between the claim and this word: nothing was started, and this is what proves it.
  : >"$2/unstarted"
  exit 125
fi
reach supervisor.start.before "$1"
exec 2>>"$2/exit"
(
  trap : PIPE
  exec </dev/null >>"$2/out" 2>>"$2/err" || exit 126
  cd -P -- "$3" 2>/dev/null || exit 126
  ulimit -f "$5" 2>/dev/null
  unset OLDPWD UNREAL_AGENT_FAULT_KILL
  IFS=$'\n'
  for group in $7; do
    echo 0 >"$group" || exit 126
  done
  unset IFS
  IFS= read -r stat </proc/self/stat
  echo "$stat" >"$2/started" || exit 126
  echo "$1 $BASHPID" 2>/dev/null >&3
  exec 3>&-
  if [ $# -gt 9 ]; then
    # Where bubblewrap says that the command began and how it ended; the command does not get it.
    exec 9>"$2/sandbox" || exit 126
    words=("${@:10}" --json-status-fd 9 --chdir "$PWD")
    text=(-c -- "$6" bash)
    if [ -z "$6" ]; then
      words+=(--ro-bind "$2/command" /run/command)
      text=(-- /run/command)
    fi
    words+=(--remount-ro / --)
    if [ -n "$8" ]; then
      # Counted from within: outside it would count all processes of this user, and bound bubblewrap too.
      words+=("$4" --norc --noprofile -c 'ulimit -u "$1" && ulimit -v "$2" && shift 2 && exec "$@"' bash "$8" "$9")
    fi
    exec "${words[@]}" "$4" "${text[@]}"
  fi
  if [ -n "$6" ]; then
    exec "$4" -c -- "$6" bash
  fi
  exec "$4" -- "$2/command"
) &
exec 3>&-
pid=$!
reach supervisor.start.after "$1"
pause=
while :; do
  wait "$pid"
  code=$?
  # A trapped signal ends the wait early, and so does a command that is stopped; it is over once its process is.
  kill -0 "$pid" 2>/dev/null || break
  # While it is stopped the next wait ends at once too ("wait -f" turns in circles inside): read what never comes.
  [ -n "$pause" ] || exec {pause}<> <(:)
  IFS= read -r -t 0.1 -u "$pause"
done
if [ "$code" -gt 128 ]; then
  # It may have ended just after a wait that told of a signal of ours or of its stop; bash keeps its real end.
  wait "$pid"
  last=$?
  [ "$last" = 127 ] || code=$last
fi
reach supervisor.exit.before "$1"
echo "exit $code" >&2
reach supervisor.exit.after "$1"
exit "$code"
