use std::panic::{self, AssertUnwindSafe};
use std::process::ExitCode;

use clap::Parser;

use walrelay::cli::Cli;
use walrelay::commands;
use walrelay::config::{Config, Surroundings, Task};
use walrelay::error::{Exit, Failure};
use walrelay::service;
use walrelay::telemetry::{self, Voice};

fn main() -> ExitCode {
    panic::set_hook(Box::new(telemetry::report_panic));
    let cli = match Cli::try_parse() {
        Ok(cli) => cli,
        // --help and --version come this way too, with exit code 0.
        Err(error) => {
            let _ = error.print();
            if error.use_stderr() {
                telemetry::say(
                    "remedy: correct the command line; walrelay COMMAND --help lists its flags",
                );
            }
            return ExitCode::from(u8::try_from(error.exit_code()).unwrap_or(Exit::Usage as u8));
        }
    };
    let exit = match panic::catch_unwind(AssertUnwindSafe(|| start(cli))) {
        Ok(Ok(())) => Exit::Clean,
        Ok(Err(failure)) => {
            telemetry::say(&failure.to_string());
            failure.exit
        }
        // The hook has said what happened.
        Err(_) => Exit::Unexpected,
    };
    ExitCode::from(exit as u8)
}

fn start(cli: Cli) -> Result<(), Failure> {
    let config = Config::resolve(cli.command, &Surroundings::of_process())?;
    let voice = match config.task {
        Task::Run(_) | Task::Init(_) | Task::Drain(_) => Voice::Full,
        Task::Check(_) | Task::Status(_) | Task::DeadLetters(_) | Task::Drop(_) => Voice::Aside,
        Task::Demo(_) => Voice::Aside,
    };
    telemetry::init(config.log, voice)?;
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .map_err(|error| {
            Failure::new(
                Exit::Unexpected,
                format!("cannot start: {error}"),
                "raise this process's limits (ulimit -n)",
            )
        })?;
    // Jobs of the service stay on this thread: what they hold is not shared with others.
    let local = tokio::task::LocalSet::new();
    runtime.block_on(local.run_until(dispatch(config.task)))
}

async fn dispatch(task: Task) -> Result<(), Failure> {
    match task {
        Task::Run(config) => service::run(*config).await,
        Task::Init(config) => commands::init::run(*config).await,
        Task::Check(config) => commands::check::run(*config).await,
        Task::Status(config) => commands::status::run(*config).await,
        Task::DeadLetters(config) => commands::dead_letters::run(*config).await,
        Task::Drain(config) => commands::drain::run(*config).await,
        Task::Drop(config) => commands::drop::run(*config).await,
        Task::Demo(config) => commands::demo::run(config).await,
    }
}
