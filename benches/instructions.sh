#!/usr/bin/env bash
# Counts the instructions that one order costs between the consumer and the producer (the operators of
# topologies/orders.toml), by callgrind on the development build: the same on a busy machine as on a quiet one. Fails
# where they are more than benches/instructions.txt says and 3 % on top; fewer by as much want the file written anew:
#
#   benches/instructions.sh --update
set -euo pipefail
cd "$(dirname "$0")/.."

tolerance=3
known=benches/instructions.txt
binary=$(cargo test --quiet --bench operators --no-run --message-format=json |
    sed -n 's/.*"executable":"\([^"]*operators-[^"]*\)".*/\1/p' | tail -1)

# What so many orders cost, less what half as many do: start and end cancel out.
count() {
    SEMEL_INSTRUCTIONS=$1 valgrind --tool=callgrind --callgrind-out-file=/dev/null "$binary" 2>&1 |
        sed -n 's/.*Collected *: *\([0-9]*\).*/\1/p'
}
few=$(count 10000)
many=$(count 20000)
found=$(((many - few) / 10000))

if [ "${1:-}" = --update ]; then
    echo "$found" >"$known"
fi
expected=$(cat "$known")
echo "instructions an order: $found (benches/instructions.txt: $expected, tolerance $tolerance %)"
if [ $((found * 100)) -gt $((expected * (100 + tolerance))) ]; then
    echo "the hot path has become slower: find out why, or write the file anew with benches/instructions.sh --update" >&2
    exit 1
fi
if [ $((found * 100)) -lt $((expected * (100 - tolerance))) ]; then
    echo "the hot path has become faster: write the file anew with benches/instructions.sh --update" >&2
    exit 1
fi
