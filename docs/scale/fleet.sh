#!/bin/bash
# A fleet that outgrows one program, on this machine: PostgreSQL, two Mosquittos, two coordinators of which one
# leads, two workers at each broker, and boards that hold scikit-learn's handwritten digits, at one broker or the
# other. The leader is killed in the middle of a round, and the job goes on. docs/scale.md tells of it.
#
#   apt-get install postgresql mosquitto
#   pip install '.[coordinator,postgresql,demo]'
#   docs/scale/fleet.sh DIRECTORY
#
# All of it is in DIRECTORY, and everything that it started ends with it. As root it starts PostgreSQL as the
# user postgres, who has to reach DIRECTORY.
set -euo pipefail

root=$(mkdir -p "${1:?usage: fleet.sh DIRECTORY}" && cd "$1" && pwd)
boards=${BOARDS:-4} rounds=${ROUNDS:-4}
database=${DATABASE_PORT:-15432} broker=${BROKER_PORT:-11883} second=${SECOND_BROKER_PORT:-11884}
dpagent=${DPAGENT:-dpagent} python=${PYTHON:-python3}
programs=$(ls -d /usr/lib/postgresql/*/bin 2>/dev/null | sort -V | tail -1)
mosquitto=$(PATH=$PATH:/usr/sbin command -v mosquitto) || { echo "fleet.sh: mosquitto is not installed" >&2; exit 3; }
[ -x "${programs:=$(dirname "$(command -v postgres || true)")}/initdb" ] || {
    echo "fleet.sh: PostgreSQL is not installed (apt-get install postgresql)" >&2; exit 3; }
[ ! -e "$root/postgresql" ] || { echo "fleet.sh: $root is in use; give a new directory" >&2; exit 2; }

started=()
finish() { # Last started, first ended; the database ends when nobody uses it any more.
    for ((i = ${#started[@]} - 1; i >= 0; i--)); do kill "${started[i]}" 2>/dev/null || true; done
    wait 2>/dev/null || true
}
trap finish EXIT
trap 'exit 130' INT TERM
begin() { # NAME COMMAND…
    local name=$1
    shift
    "$@" >"$root/$name.log" 2>&1 &
    started+=($!)
    echo "$name: process $!"
}
await() { # WHAT COMMAND…
    local what=$1 left=120
    shift
    until "$@" >/dev/null 2>&1; do
        ((left-- > 0)) || { echo "fleet.sh: waited in vain for $what; see $root/*.log" >&2; exit 10; }
        sleep 0.5
    done
}

# PostgreSQL, with a password.
(umask 077 && "$python" -c 'import secrets; print(secrets.token_hex(16))' >"$root/database.password")
as_user=()
if [ "$(id -u)" = 0 ]; then
    as_user=(runuser -u postgres --)
    mkdir "$root/postgresql" && chown postgres "$root/postgresql" "$root/database.password"
fi
(cd / && "${as_user[@]}" "$programs/initdb" -D "$root/postgresql" -U fleet --pwfile "$root/database.password" \
    -A scram-sha-256 >"$root/initdb.log" 2>&1) || { cat "$root/initdb.log" >&2; exit 8; }
[ "$(id -u)" != 0 ] || chown root "$root/database.password"
cd /
begin postgresql "${as_user[@]}" "$programs/postgres" -D "$root/postgresql" -p "$database" \
    -c listen_addresses=127.0.0.1 -c unix_socket_directories=
cd "$root"
await PostgreSQL "$programs/pg_isready" -h 127.0.0.1 -p "$database"
PGPASSWORD=$(cat database.password) "$programs/createdb" -h 127.0.0.1 -p "$database" -U fleet meadow

# Mosquitto. On a network: docs/deploy.md, with TLS, passwords and rights.
cat >broker-1.conf <<EOF
listener $broker 127.0.0.1
allow_anonymous true
max_queued_messages 100000
EOF
# What the coordinator publishes at the first broker comes to the second one over a bridge. Fragments stay where
# they were sent, and are counted by the workers there.
cat >broker-2.conf <<EOF
listener $second 127.0.0.1
allow_anonymous true
max_queued_messages 100000
connection first
address 127.0.0.1:$broker
notifications false
topic plan in 1 dpagent/v1/meadow/ dpagent/v1/meadow/
topic model/+ in 1 dpagent/v1/meadow/ dpagent/v1/meadow/
topic asset/# in 1 dpagent/v1/meadow/ dpagent/v1/meadow/
topic receipts in 1 dpagent/v1/meadow/ dpagent/v1/meadow/
EOF
begin broker-1 "$mosquitto" -c broker-1.conf
await "the first broker" bash -c "exec 3<>/dev/tcp/127.0.0.1/$broker"
begin broker-2 "$mosquitto" -c broker-2.conf
await "the second broker" bash -c "exec 3<>/dev/tcp/127.0.0.1/$second"

# The coordinators and the workers have one file; on several machines, a copy of it and of keys/ each. Workers at
# the second broker name that one.
cat >fleet.yaml <<EOF
fleet: meadow
devices: $boards
records_per_device: 200
rounds: $rounds
privacy: {epsilon: 8, delta: 1e-5, sampling_rate: 0.5}
model: {name: digits}
round: {compute_slot_s: 1, jitter_window_s: 2, device_grid_s: 0.5, deadline_s: 60}
store: {url: "postgresql://fleet@127.0.0.1:$database/meadow", password_file: database.password}
mqtt: {url: "mqtt://127.0.0.1:$broker"}
EOF
sed "s/:$broker\"/:$second\"/" fleet.yaml >fleet-2.yaml
chmod 600 database.password
key=$("$dpagent" coordinator key --config fleet.yaml)
begin coordinator-1 "$dpagent" coordinator run --config fleet.yaml
leader=${started[-1]}
await "the first plan" grep -q "begins" coordinator-1.log
begin coordinator-2 "$dpagent" coordinator run --config fleet.yaml
begin worker-1 "$dpagent" coordinator worker --name one --config fleet.yaml
begin worker-2 "$dpagent" coordinator worker --name two --config fleet.yaml
begin worker-3 "$dpagent" coordinator worker --name three --config fleet-2.yaml
begin worker-4 "$dpagent" coordinator worker --name four --config fleet-2.yaml

# Boards, in turns at one broker and the other.
"$python" - "$boards" <<'EOF'
import sys
import numpy as np
from sklearn.datasets import load_digits
pixels, labels = load_digits(return_X_y=True)
for number in range(int(sys.argv[1])):
    mine = slice(200 * number, 200 * number + 200)
    inputs = (pixels[mine] / 16).astype(np.float32).reshape(-1, 8, 8, 1)
    np.savez(f"board-{number}.npz", inputs=inputs, labels=labels[mine].astype(np.int64))
EOF
for ((number = 0; number < boards; number++)); do
    mkdir -p "board-$number"
    at=$broker
    ((number % 2 == 0)) || at=$second
    cat >"board-$number/agent.yaml" <<EOF
fleet: meadow
coordinator_key: $key
state_dir: state
data: {name: digits, kind: npz, path: ../board-$number.npz, classes: 10, shape: [8, 8, 1], dtype: float32, max_records: 200}
budget: {epsilon: 10, delta: 1e-4}
limits: {minimum_compute_slot_s: 0.5, minimum_jitter_window_s: 1, minimum_fragments: 1, messages_per_second: 50}
mqtt: {url: "mqtt://127.0.0.1:$at"}
EOF
    "$dpagent" budget init --config "board-$number/agent.yaml" >/dev/null
    begin "board-$number" "$dpagent" run --config "board-$number/agent.yaml"
done

# The leader dies in the middle of the second round.
await "the second round" bash -c "grep -q 'round 2 is counted' worker-?.log"
kill -9 "$leader"
wait "$leader" 2>/dev/null || true # What the shell says of it is no news.
echo "killed coordinator-1, process $leader"
await "the other one to lead" grep -q "continues after round" coordinator-2.log
echo "coordinator-2 leads"
await "the end of the job" grep -q "all jobs are over" coordinator-2.log
"$dpagent" coordinator status --config fleet.yaml
