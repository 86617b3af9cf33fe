#!/usr/bin/env bash
# Runs a group of tests: group.sh [--live] NAME COMMAND ... What it prints is kept in build/NAME.txt, its exit status in
# build/NAME.status, its CPU time in build/NAME.cpu. It is shown when all of it is there, or with --live as it
# comes.
set -uo pipefail

live=
if [ "$1" = --live ]; then live=yes; shift; fi
name=$1
shift
mkdir -p build
if [ -n "$live" ]; then
    # pytest sees a pipe, and whoever looks a terminal.
    if [ -t 1 ]; then export PY_COLORS=1; fi
    "$@" 2>&1 | tee "build/$name.txt"
    status=$?
else
    "$@" >"build/$name.txt" 2>&1
    status=$?
    cat "build/$name.txt"
fi
times >"build/$name.cpu"
echo "$status" >"build/$name.status"
exit "$status"
