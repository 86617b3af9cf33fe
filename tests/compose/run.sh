#!/usr/bin/env bash
# Runs compose.yaml on the Docker Engine at hand and holds it to docs/deployment.md: up, scale, stream, lose a worker in
# the middle of a stream, restart what crashes, stop cleanly. Needs docker with Compose v2; leaves nothing behind but
# images. The project has a name and a port of its own, so it may run beside an Octavo that is in use.
set -euo pipefail
cd "$(dirname "$0")/../.."

export COMPOSE_PROJECT_NAME=octavo-test OCTAVO_PORT=0 OCTAVO_HTTP_PORT=0
# In float32 a token does not depend on the batch or on the worker: every answer below must be the same.
export OCTAVO_DTYPE=float32 OCTAVO_NUM_BLOCKS=512 OCTAVO_THREADS=1
readonly PROMPT="Once upon a time, in a small village by the sea," NUM_TOKENS=160
scratch=$(mktemp -d)

clean_up() {
  local status=$?
  if [ $status -ne 0 ]; then
    echo "FAIL: status $status; the last lines of each process:"
    docker compose ps --all
    docker compose logs --no-color --tail 25
  fi
  [ -z "${stranger:-}" ] || docker rm --force "$stranger" >"$scratch/down.log" 2>&1 || true
  docker compose down --volumes --timeout 20 >"$scratch/down.log" 2>&1 || cat "$scratch/down.log"
  rm -rf "$scratch"
  exit $status
}
trap clean_up EXIT

stage() { printf '\n== %s\n' "$*"; }

# check WHAT COMMAND...: the command must succeed.
check() {
  local what=$1
  shift
  if "$@"; then echo "PASS: $what"; else echo "FAIL: $what"; exit 1; fi
}

# eventually WHAT COMMAND...: the command must succeed within two minutes.
eventually() {
  local what=$1 deadline=$((SECONDS + 120))
  shift
  until "$@"; do
    if [ $SECONDS -ge $deadline ]; then echo "FAIL: $what (not within 120 s)"; exit 1; fi
    sleep 0.3
  done
  echo "PASS: $what"
}

up() { docker compose up --detach --wait --wait-timeout 300 --no-recreate "$@" >"$scratch/up.log" 2>&1 || { cat "$scratch/up.log"; return 1; }; }

# A client on this machine, outside the project's networks.
from_host() { timeout 180 docker run --rm --network host "$COMPOSE_PROJECT_NAME-frontend" "$@"; }
address() { docker compose port frontend 50051; }
answers_health() { from_host health "$(address)" --service octavo.v1.GenerationService; }
generate() { from_host generate "$PROMPT" --temperature 0 --max-new-tokens $NUM_TOKENS --server "$(address)"; }
# The beginning of what the published HTTP port answers at a path.
get() {
  timeout 60 docker run --rm --network host --entrypoint python "$COMPOSE_PROJECT_NAME-frontend" -c \
    'import sys, urllib.request as u; print(u.urlopen(sys.argv[1], timeout=30).read(400).decode())' \
    "http://$(docker compose port frontend 8000)$1"
}
# Not piped to grep, which would end before the answer does.
lists_model() { [[ $(get /v1/models) == *smollm2* ]]; }
shows_page() { [[ $(get /) == *'<title>Octavo'* ]]; }
watches_blocks() { [[ $'\n'$(get /live) == *$'\n''data: '* ]]; }
first_answer() { generate >"$scratch/answer" && grep -q '[[:alpha:]]' "$scratch/answer"; }
same_answer() { generate >"$scratch/again" && diff "$scratch/answer" "$scratch/again"; }

books() { docker compose exec -T scheduler python - <tests/compose/workers.py; }
registered() { [ "$(books | wc -l)" -eq "$1" ]; }
idle() { books | awk '$2 != 0 || $3 != $4 { exit 1 }'; }
restarted() { [ "$(docker inspect --format '{{.RestartCount}} {{.State.Health.Status}}' "$1")" = "1 healthy" ]; }

# says CONTAINER TEXT: whether its log has the text.
says() { [ "$(docker logs "$1" 2>&1 | grep -c "$2")" -gt 0 ]; }
keys_are_private() {
  [ "$(docker compose exec -T worker sh -c 'stat -c %a /curve/keys /curve/keys/*.secret' | tr '\n' ' ')" = "700 600 600 600 " ]
}

# Not root, no capability left, nothing to write to but /tmp.
confined() {
  docker compose exec -T "$1" sh -c '
    test "$(id -u):$(id -g)" = 10001:0 && grep -q "^CapBnd:[[:space:]]*0*$" /proc/self/status &&
    grep -q "^NoNewPrivs:[[:space:]]*1$" /proc/self/status &&
    grep -q "^[^ ]* / [^ ]* ro," /proc/mounts && ! touch /var/cache/octavo/file 2>/dev/null && touch /tmp/file'
}

without_torch() { docker compose exec -T "$1" python -c 'import importlib.util, sys; sys.exit(importlib.util.find_spec("torch") is not None)'; }

# in_mid_stream COMMAND...: runs it while a stream is under way, and waits for the stream, which must end well.
in_mid_stream() {
  : >"$scratch/again"
  generate >"$scratch/again" &
  local stream=$!
  until [ "$(wc -c <"$scratch/again")" -ge 40 ]; do
    kill -0 $stream || return 1
    sleep 0.1
  done
  "$@" && wait $stream
}

# A worker's id is its host name, which is its container's id, and its process id.
kill_busy_worker() {
  killed=$(books | awk '$2 > 0 { sub(/-[0-9]+$/, "", $1); print $1; exit }')
  docker kill "$killed" >/dev/null
}

# Everything dies in the container but PID 1, which then ends with the process's status.
crash() { docker exec "$1" sh -c 'kill -9 -1' || true; }

all_ended_well() {
  docker compose stop 2>"$scratch/stop.log"
  docker compose ps --all --quiet | xargs docker inspect --format '{{.Name}} {{.State.ExitCode}}' >"$scratch/ended"
  [ -s "$scratch/ended" ] && ! grep -v " 0$" "$scratch/ended"
}

stage "Build the images"
docker compose build --quiet

stage "Start frontend, scheduler and one worker"
check "all become healthy" up
check "the published port answers" answers_health
check "the published HTTP port names the model" lists_model
check "it has the page" shows_page
check "and what the page watches" watches_blocks
for service in frontend scheduler worker; do check "$service is confined" confined $service; done
for service in frontend scheduler; do check "$service has no torch" without_torch $service; done
check "the network of ZMQ and Admin is internal" \
  test "$(docker network inspect --format '{{.Internal}}' ${COMPOSE_PROJECT_NAME}_internal)" = true
check "a request streams text" first_answer

stage "Scale to three workers"
check "all become healthy" up --scale worker=3
eventually "three workers are in the scheduler's books" registered 3
check "the answer is the same" same_answer

stage "Start a worker without keys beside them"
check "the keys are private" keys_are_private
stranger=$(docker compose run --detach --no-deps \
  --env OCTAVO_CURVE_KEYS= --env OCTAVO_INSECURE_TCP=1 --env OCTAVO_DEVICE=fake worker)
eventually "it says that it is not let in" says "$stranger" "does not let this process in"
eventually "so does the scheduler" says "$(docker compose ps --quiet scheduler)" "kept out a peer"
check "three workers are in the books" registered 3
docker rm --force "$stranger" >/dev/null
stranger=

stage "Kill the worker that computes a stream, in the middle of it"
check "the stream goes on to its end" in_mid_stream kill_busy_worker
check "the answer is the same" diff "$scratch/answer" "$scratch/again"
eventually "two workers are left in the books" registered 2
check "a new request streams" same_answer
eventually "every block is free again" idle

stage "Crash another worker's process"
# Not through `head`, which would leave while the command still writes.
crashed=$(docker compose ps --quiet worker)
crashed=${crashed%%$'\n'*}
crash "$crashed"
eventually "Docker starts it again, and it registers" restarted "$crashed"
eventually "two workers are in the books" registered 2
check "the answer is the same" same_answer

stage "Restart the scheduler"
docker compose restart scheduler 2>"$scratch/restart.log"
eventually "two workers register with the new one" registered 2
check "the answer is the same" same_answer

stage "Stop: the frontend in the middle of a stream, then the rest"
check "the stream goes on to its end" in_mid_stream docker compose stop frontend
check "the answer is the same" diff "$scratch/answer" "$scratch/again"
docker rm "$killed" >/dev/null
check "every process ends with status 0" all_ended_well
