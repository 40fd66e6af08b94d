#!/usr/bin/env bash
# Stands before the command of a rank, lets the preflight be, and ends as the word of $ENDINGS for this attempt of the job says:
#   STATUS        all ranks end with it            RANK:STATUS   this one does, having said why; the others end with 1 after $WAIT (1) seconds
#   RANK:gone     this one is killed, with the shell that would note how it ended
#   deaf          nobody heeds a signal            begun         rank 0 is killed when its command has noted the attempt
[[ $* == *" preflight "* ]] && exec "$@"
read -ra words <<<"$ENDINGS"
attempt=${SLURM_RESTART_COUNT:-0}
told=$RUN/slurm/told # what this process finds in its environment, for the tests
mkdir -p "$told"
echo "$SLURM_STEP_ID ${SLURM_CPUS_PER_TASK:-} ${HACPO_MEGA_SECRET:-}" >"$told/$attempt.$SLURM_PROCID"
word=${words[attempt]}
case $word in
  deaf)
    trap '' USR1
    sleep 600
    ;;
  begun)
    [[ $SLURM_PROCID == 0 ]] || exit 1
    "$@" &
    while kill -0 $! 2>/dev/null; do
      [[ $(grep -c '"step"' "$RUN/logs/attempts.jsonl" 2>/dev/null) -gt $attempt ]] && kill -KILL $!
      sleep 0.1
    done
    wait $!
    exit $?
    ;;
  "$SLURM_PROCID":gone) kill -KILL $PPID $$ ;;
  "$SLURM_PROCID":*)
    echo "the reason why" >&2
    exit "${word#*:}"
    ;;
  *:*)
    sleep "${WAIT:-1}"
    exit 1
    ;;
  *) exit "$word" ;;
esac
