#!/usr/bin/env python3
"""Repeats the published figures that benches/compare.py and `semel bench` do not give, and prints medians.

- growth: the Kafka stage of topologies/orders.toml (exactly-once, 100 ms) by partitions of input and output, by
  workers, and on ten times the records;
- rows: its Postgres stage, one connection, against the same statement sent raw (benches/rows.rs), new keys all of them;
- commit: from the seal to the acknowledged commit of transactions that hold positions only;
- start: from the start of a process to its first record, where it makes its topics, and where it goes on.

Nothing else should run on the machine. It takes the development cluster for itself, which must not be up.

    benches/figures.py [--rounds 3] [--records 1000000] [--only growth,rows,commit,start] [--raw runs.jsonl]

Needs cargo, and what `semel dev up` needs.
"""

import argparse
import json
import os
import pathlib
import re
import statistics
import subprocess
import tempfile

ROOT = pathlib.Path(__file__).resolve().parent.parent
SEMEL = ROOT / "target/release/semel"
BUILD = ["cargo", "build", "--release"]
ROWS = ["cargo", "bench", "--quiet", "--bench", "rows", "--"]
KAFKA_STAGE = (ROOT / "topologies/orders.toml").read_text().split("# One row an order")[0]
PARTITIONS = (1, 4, 16, 64)
TEN = 10
# A commit is long over when the next record comes.
RATE, SECONDS = 40, 45

COPY = """
name = "{name}"
guarantee = "at-least-once"
kafka.brokers = "${{KAFKA_BROKERS}}"
[sources.orders]
type = "kafka"
topics = ["orders"]
"""
SINK = """
[sinks.{name}]
type = "kafka"
inputs = ["{node}"]
topic = "{topic}"
create = {{ partitions = {partitions} }}
"""
FILTER = """
[transforms.some]
type = "filter"
inputs = ["orders"]
condition = "{condition}"
"""
# What comes to the Postgres stage: priced orders that the table takes, here each of a key of its own.
UNIQUE = """
[transforms.unique]
type = "remap"
inputs = ["orders"]
source = '''
if .status == "cancelled" || .qty == 0 { abort }
.order_id = string!(.order_id) + "-" + to_string(%partition) + "-" + to_string(%offset)
.total = to_float!(.qty) * to_float!(.price)
del(.note)
'''
"""
# One worker and one partition, so that its rows go into the table in the order in which the raw ones do.
POSTGRES_STAGE = """
name = "{name}"
guarantee = "exactly-once"
commit_interval = "100ms"
kafka.brokers = "${{KAFKA_BROKERS}}"
[sources.orders]
type = "kafka"
topics = ["input.unique"]
[sinks.orders_table]
type = "postgres"
inputs = ["orders"]
url = "${{DATABASE_URL}}"
table = "rows"
key = ["order_id"]
version = "version"
deleted = "deleted"
delete_when = '.status == "deleted"'
"""


def run(command, environment):
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, cwd=ROOT, env=environment)
    if done.returncode != 0:
        raise SystemExit(f"{command[0]} ended with {done.returncode}:\n{done.stderr[-3000:]}")
    return done.stdout


class Jobs:
    """Jobs on one cluster; each that has a name of its own begins at the beginning."""

    def __init__(self, folder, environment):
        self.folder, self.environment, self.names = folder, {**environment, "XDG_STATE_HOME": str(folder)}, 0

    def name(self):
        self.names += 1
        return f"job-{self.names}"

    def command(self, name, text):
        file = self.folder / f"{name}.toml"
        file.write_text(text)
        return [SEMEL, "run", file, "--quiet", "--json"]

    def start(self, name, text):
        """Its process, which goes on."""
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        return subprocess.Popen(self.command(name, text), env=self.environment, **pipes)

    def drain(self, name, text):
        """What the run reports, and of its stage."""
        report = json.loads(run([*self.command(name, text), "--drain"], self.environment))
        return report, report["stages"][0]

    def copy(self, *parts):
        """A file of these nodes over all of the quick start's orders."""
        name = self.name()
        self.drain(name, "".join([COPY.format(name=name), *parts]))

    def orders(self, name, topic, partitions, top=""):
        """The Kafka stage over that topic."""
        text = KAFKA_STAGE.replace('name = "orders"', f'name = "{name}"\n{top}')
        text = text.replace('topics = ["orders"]', f'topics = ["{topic}"]').replace("orders.priced", f"{name}.out")
        return self.drain(name, text.replace("{ partitions = 4 }", f"{{ partitions = {partitions} }}"))


def sink(node, topic, partitions):
    return SINK.format(name=f"sink_{partitions}", node=node, topic=topic, partitions=partitions)


def growth_inputs(jobs):
    jobs.copy(*(sink("orders", f"input.{partitions}", partitions) for partitions in PARTITIONS))
    for _ in range(TEN):
        jobs.copy(sink("orders", "input.ten", 4))


def growth(jobs, note):
    cases = [(f"partitions {partitions}", f"input.{partitions}", partitions, "") for partitions in PARTITIONS]
    cases.append(("partitions 4, workers 2", "input.4", 4, "workers = 2"))
    cases.append((f"partitions 4, {TEN} times the records", "input.ten", 4, ""))
    for case, topic, partitions, top in cases:
        report, stage = jobs.orders(jobs.name(), topic, partitions, top)
        figures = {
            "records": stage["in"],
            "records_per_s": stage["in"] / stage["busy_seconds"],
            "cpu_s_per_million": report["cpu_seconds"] * 1e6 / stage["in"],
            "peak_rss_mib": report["peak_memory_bytes"] / 2**20,
        }
        note("growth", case, figures)


def rows_inputs(jobs):
    jobs.copy(UNIQUE, sink("unique", "input.unique", 1))


def rows(jobs, note):
    raw = json.loads(run([*ROWS, "rows", "input.unique"], jobs.environment))
    note("rows", "raw", {"rows": raw["rows"], "rows_per_s": raw["rows"] / raw["seconds"]})
    run([*ROWS, "rows"], jobs.environment)
    name = jobs.name()
    _, stage = jobs.drain(name, POSTGRES_STAGE.format(name=name))
    if stage["rows"] != raw["rows"]:
        raise SystemExit(f"the stage wrote {stage['rows']} rows, the raw statement {raw['rows']}")
    per_s = stage["rows"] / stage["busy_seconds"]
    note("rows", "stage", {"rows": stage["rows"], "rows_per_s": per_s, "of_raw": per_s * raw["seconds"] / raw["rows"]})


def commit(jobs, note):
    name = jobs.name()
    topic = f"input.{name}"
    jobs.copy(FILTER.format(condition="false"), sink("some", topic, 4))
    text = KAFKA_STAGE.replace('name = "orders"', f'name = "{name}"\nbatch_records = 1')
    text = text.replace("""'.status != "cancelled"'""", '"false"').replace("orders.priced", f"{name}.out")
    job = jobs.start(name, text.replace('topics = ["orders"]', f'topics = ["{topic}"]'))
    # Batches that were sealed meanwhile would wait for each other.
    assigned = any("assigned" in line for line in job.stderr)
    probe = [SEMEL, "probe", "--brokers", jobs.environment["KAFKA_BROKERS"], "--input", topic, "--output", topic]
    try:
        if assigned:
            run([*probe, "--rate", RATE, "--seconds", SECONDS], jobs.environment)
    finally:
        job.terminate()
    output, errors = job.communicate()
    if job.returncode != 0:
        raise SystemExit(f"{name} ended with {job.returncode}:\n{errors}")
    stage = json.loads(output)["stages"][0]
    note("commit", "positions only", {"transactions": stage["transactions"], "commit_ms": stage["commit_ms"]})


def start(jobs, note):
    name = jobs.name()
    topic = f"input.{name}"
    for case in ("makes its topics", "goes on", "goes on", "goes on"):
        jobs.copy(FILTER.format(condition="%offset < 500"), sink("some", topic, 4))
        _, stage = jobs.orders(name, topic, 4)
        note("start", case, {"first_record_ms": stage["first_record_seconds"] * 1000})


# What makes the inputs, once, and what is measured on them in each round.
MEASURES = {
    "growth": (growth_inputs, growth),
    "rows": (rows_inputs, rows),
    "commit": (None, commit),
    "start": (None, start),
}


def main():
    arguments = argparse.ArgumentParser()
    arguments.add_argument("--records", type=int, default=1_000_000)
    arguments.add_argument("--rounds", type=int, default=3)
    arguments.add_argument("--only", default=",".join(MEASURES), help="some of them, separated by commas")
    arguments.add_argument("--raw", type=pathlib.Path, help="a JSON line a run is added to it")
    options = arguments.parse_args()
    if unknown := set(options.only.split(",")) - set(MEASURES):
        arguments.error(f"--only takes {', '.join(MEASURES)}, not {', '.join(unknown)}")
    chosen = [MEASURES[measure] for measure in options.only.split(",")]
    environment = {key: os.environ[key] for key in os.environ if key not in ("KAFKA_BROKERS", "DATABASE_URL")}
    run(BUILD, environment)
    run([*ROWS[:-1], "--no-run"], environment)
    if json.loads(run([SEMEL, "dev", "status", "--json"], environment))["up"]:
        raise SystemExit("the development cluster is up: stop it first with semel dev down")
    found = {}

    def note(measure, case, figures):
        found.setdefault((measure, case), []).append(figures)
        if options.raw:
            with options.raw.open("a") as raw:
                raw.write(json.dumps({"measure": measure, "case": case, **figures}) + "\n")

    try:
        run([SEMEL, "quickstart", "--keep", "--records", options.records], environment)
        environment |= re.findall(r"export (\w+)='?([^'\s]+)", run([SEMEL, "dev", "up"], environment))
        with tempfile.TemporaryDirectory() as folder:
            jobs = Jobs(pathlib.Path(folder), environment)
            for inputs, _ in chosen:
                if inputs:
                    inputs(jobs)
            for _ in range(options.rounds):
                for _, measure in chosen:
                    measure(jobs, note)
    finally:
        run([SEMEL, "dev", "down"], environment)
    for (measure, case), runs in found.items():
        medians = {key: round(statistics.median(run[key] for run in runs), 2) for key in runs[0]}
        print(f"{measure}, {case}:", *(f"{key}={value}" for key, value in medians.items()))


if __name__ == "__main__":
    main()
