#!/bin/sh
# Starts the run, or takes it up where a controller before this one was. When the pod has to move, it ends at once, as
# in a crash: nodes train on meanwhile. `kubectl exec deploy/holdfast -- holdfast stop` ends the run itself.
trap 'exit 0' TERM
run=/state/run
case " $*" in
*" --journal="*) # the same command waits, takes a run over that has no controller, and ends with 0 when it is over
    holdfast run "$@" &
    wait $! || exit
    ;;
*)
    if [ -e "$run/run.json" ]; then set -- --resume "$run"; else set -- --run-dir "$run" "$@"; fi
    if [ ! -e "$run/exit.json" ]; then
        holdfast run "$@" &
        wait $!
        code=$?
        [ -e "$run/exit.json" ] || exit "$code"
    fi
    ;;
esac
echo "the run has ended; holdfast report says how"
sleep infinity &
wait $!
