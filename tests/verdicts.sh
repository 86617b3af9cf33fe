#!/usr/bin/env bash
# Prints one line for each group that group.sh has run: its name, how it ended, its closing line and its CPU time, then the
# sum of these times. Fails unless all passed.
set -uo pipefail

all=0 total=0
for name in "$@"; do
    status=$(cat "build/$name.status" 2>/dev/null)
    case "$status" in
        0) verdict=passed ;;
        '') verdict='did not run' ;;
        *) verdict="FAILED ($status)" ;;
    esac
    [ "$status" = 0 ] || all=1
    # Something may be printed behind the closing line, by what ends last.
    closing=$(sed -E 's/\x1b\[[0-9;]*m//g' "build/$name.txt" 2>/dev/null | grep -aE '^=+ .* in [0-9.]+s|^checks: |^[0-9]+ of [0-9]+ killed|^no score: |^failed: ' | tail -n 1)
    # The last line of `times`: minutes and seconds of all processes, as user and in the kernel.
    cpu=$(tail -n 1 "build/$name.cpu" 2>/dev/null | tr ms '  ' | awk '{ printf "%.0f", 60 * ($1 + $3) + $2 + $4 }')
    total=$((total + ${cpu:-0}))
    printf '%-15s %-12s %s; %s s of CPU\n' "$name" "$verdict" "$(tr -d = <<<"$closing" | sed -E 's/^ +//; s/ +$//')" "${cpu:-0}"
done
printf '%-15s %s s of CPU\n' all $total
exit "$all"
