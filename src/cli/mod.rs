//! The command line: one file a command. Results go to stdout, logs and progress to stderr.

use clap::{Parser, Subcommand, ValueEnum};

use crate::bench::probe;
use crate::drill::auto_commit;
use crate::error::{Exit, Failure};
use crate::observe::usage;

mod audit;
mod bench;
mod check;
mod dev;
mod dlq;
mod drill;
mod explain;
mod file;
mod output;
mod quickstart;
mod reset;
mod run;
mod test;
mod time;

/// An exactly-once stream processor: topologies declared in TOML, Kafka to Kafka in one transaction, Postgres under a
/// version guard.
#[derive(Debug, Parser)]
#[command(name = "semel", version, max_term_width = 120)]
struct Cli {
    #[command(subcommand)]
    command: Command,
    /// How logs are written to stderr.
    #[arg(long, global = true, value_enum, default_value_t = LogFormat::Text)]
    log_format: LogFormat,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum LogFormat {
    Text,
    Json,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Run the main job on a real broker and a real Postgres, from nothing, and check the result.
    Quickstart(quickstart::Args),
    /// Run a topology as a stream job.
    Run(run::Args),
    /// Print all findings of topology files.
    Check(check::Args),
    /// Print the plan and the guarantee of every edge.
    Explain(explain::Args),
    /// Run the [[tests]] of topology files on the real operators, without a broker.
    Test(test::Args),
    /// Compare what a running system put out with what its operators make.
    Audit(audit::Args),
    /// Dead letters: list them, show one, send them back.
    Dlq(dlq::Args),
    /// Prove a topology's guarantees by killing it at every place and comparing what came out.
    Drill(drill::Args),
    /// Measure what exactly-once costs on a topology: throughput, CPU, memory and latency against at-least-once.
    Bench(bench::Args),
    /// Times the way of records through a job of any make; the comparison in benches/ uses it.
    #[command(hide = true)]
    Probe(probe::Args),
    /// A consumer that lets its client commit; a drill shows what becomes of it.
    #[command(hide = true)]
    AutoCommit(auto_commit::Args),
    /// Set the positions of a job that does not run.
    Reset(reset::Args),
    /// A local Kafka and Postgres to play with.
    Dev(dev::Args),
}

/// How the user called this program, for commands to copy.
fn program() -> String {
    std::env::args().next().unwrap_or_else(|| "semel".to_owned())
}

/// Parses the arguments of the process, runs the command and answers the exit status.
pub fn main() -> Exit {
    usage::started();
    let cli = match Cli::try_parse() {
        Ok(cli) => cli,
        Err(error) => {
            let _ = error.print();
            return if error.use_stderr() { Exit::Refused } else { Exit::Done };
        }
    };
    let filter = match cli.command {
        // A tour, not a service: the client's grumbling at a broker that has only just come up would drown it.
        Command::Quickstart(_) | Command::Drill(_) | Command::Bench(_) | Command::Probe(_) => {
            "warn,semel::kafka::logs=error"
        }
        // The database of stores tells of its files.
        _ => "info,fjall=warn,lsm_tree=warn",
    };
    crate::observe::init_logs(cli.log_format == LogFormat::Json, filter);
    let result = match cli.command {
        Command::Quickstart(args) => quickstart::run(args),
        Command::Run(args) => run::run(args),
        Command::Check(args) => check::run(args),
        Command::Explain(args) => explain::run(args),
        Command::Test(args) => test::run(args),
        Command::Audit(args) => audit::run(args),
        Command::Dlq(args) => dlq::run(args),
        Command::Drill(args) => drill::run(args),
        Command::Bench(args) => bench::run(args),
        Command::Probe(args) => probe::main(&args).map(|()| Exit::Done),
        Command::AutoCommit(args) => auto_commit::consume(&args).map(|()| Exit::Done),
        Command::Reset(args) => reset::run(args),
        Command::Dev(args) => dev::run(args),
    };
    result.unwrap_or_else(|failure: Failure| {
        eprintln!("semel: {}", failure.message);
        failure.exit
    })
}
