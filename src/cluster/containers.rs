//! The servers as containers, where an engine answers.

use std::fs;
use std::path::Path;
use std::time::{Duration, Instant};

use testcontainers::bollard::models::PortBinding;
use testcontainers::bollard::query_parameters::RemoveContainerOptionsBuilder;
use testcontainers::core::IntoContainerPort;
use testcontainers::core::client::docker_client_instance;
use testcontainers::runners::AsyncRunner;
use testcontainers::{ContainerAsync, ContainerRequest, GenericImage, ImageExt};
use tokio::runtime::Runtime;

use super::keeper::{Backend, Setup};
use super::{kafka, place, postgres};
use crate::error::Failure;

const POSTGRES_TAG: &str = "18";
/// An engine that is there answers at once; one that hangs must not keep the user waiting.
const PATIENCE: Duration = Duration::from_secs(2);
const PULL_PATIENCE: Duration = Duration::from_secs(600);

/// `None` when no engine answers or the image cannot be had: local processes are next.
pub(super) fn kafka(setup: &Setup, progress: &dyn Fn(&str)) -> Option<Box<dyn Backend>> {
    let engine = Engine::connect()?;
    let port = place::free_port().ok()?;
    let address = format!("{}:{port}", engine.host);
    let own = kafka::SETTINGS.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned()));
    let alone = kafka::replication(1).into_iter().map(|(key, value)| (key.to_owned(), value));
    let settings = own.chain(alone).chain(setup.broker_settings.iter().cloned()).chain([
        ("node.id".into(), "1".into()),
        ("process.roles".into(), "broker,controller".into()),
        ("controller.quorum.voters".into(), "1@localhost:9093".into()),
        ("controller.listener.names".into(), "CONTROLLER".into()),
        ("listeners".into(), format!("PLAINTEXT://0.0.0.0:{port},CONTROLLER://localhost:9093")),
        ("advertised.listeners".into(), format!("PLAINTEXT://{address}")),
        ("listener.security.protocol.map".into(), "PLAINTEXT:PLAINTEXT,CONTROLLER:PLAINTEXT".into()),
    ]);
    let image = GenericImage::new("apache/kafka", kafka::VERSION);
    let mut request = ContainerRequest::from(image).with_env_var("KAFKA_HEAP_OPTS", "-Xms256m -Xmx768m");
    for (key, value) in settings {
        request = request.with_env_var(variable(&key), value);
    }
    let ready = address.clone();
    let container = Described {
        title: format!("Apache Kafka {}", kafka::VERSION),
        address,
        ready: Box::new(move || kafka::answers(&ready)),
    };
    engine.run(setup, "kafka", request, (port, port), container, progress)
}

/// `None` when no engine answers or the image cannot be had: local processes are next.
pub(super) fn postgres(setup: &Setup, progress: &dyn Fn(&str)) -> Option<Box<dyn Backend>> {
    let engine = Engine::connect()?;
    let port = place::free_port().ok()?;
    let password = postgres::password();
    let url = postgres::url(&engine.host, port, &password, postgres::DATABASE);
    let request = GenericImage::new("postgres", POSTGRES_TAG)
        .with_env_var("POSTGRES_USER", postgres::USER)
        .with_env_var("POSTGRES_PASSWORD", password)
        .with_env_var("POSTGRES_DB", postgres::DATABASE)
        .with_cmd(["postgres", "-c", postgres::MAX_CONNECTIONS]);
    let ready = url.clone();
    let container = Described {
        title: format!("PostgreSQL {POSTGRES_TAG}"),
        address: url,
        ready: Box::new(move || postgres::query(&ready, "SELECT 1").is_ok()),
    };
    engine.run(setup, "postgres", request, (port, 5432), container, progress)
}

/// Removes the containers of a supervisor that was killed; `directory` is its runtime directory.
pub(super) fn remove_left_behind(directory: &Path) {
    let list = directory.join("containers");
    let Ok(names) = fs::read_to_string(&list) else { return };
    let Some(engine) = Engine::connect() else { return };
    for name in names.lines() {
        engine.remove(name);
    }
    let _ = fs::remove_file(list);
}

/// How the image's entry point wants a broker setting: `log.dirs` as KAFKA_LOG_DIRS.
fn variable(setting: &str) -> String {
    let name = setting.replace('_', "__").replace('-', "___").replace('.', "_");
    format!("KAFKA_{}", name.to_uppercase())
}

struct Engine {
    runtime: Runtime,
    /// Where mapped ports are reached.
    host: String,
}

struct Described {
    title: String,
    address: String,
    ready: Box<dyn Fn() -> bool>,
}

impl Engine {
    fn connect() -> Option<Engine> {
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().ok()?;
        let ping = async { docker_client_instance().await.ok()?.ping().await.ok() };
        runtime.block_on(async { tokio::time::timeout(PATIENCE, ping).await.ok().flatten() })?;
        let remote = std::env::var("DOCKER_HOST").ok().and_then(|h| {
            let host = h.strip_prefix("tcp://")?;
            Some(host.rsplit_once(':').map_or(host, |(host, _)| host).to_owned())
        });
        Some(Engine { runtime, host: remote.unwrap_or_else(|| "127.0.0.1".into()) })
    }

    fn remove(&self, name: &str) {
        let options = RemoveContainerOptionsBuilder::new().force(true).v(true).build();
        let remove = async { docker_client_instance().await.ok()?.remove_container(name, Some(options)).await.ok() };
        self.runtime.block_on(remove);
    }

    fn run(
        self,
        setup: &Setup,
        name: &str,
        request: ContainerRequest<GenericImage>,
        (host_port, port): (u16, u16),
        described: Described,
        progress: &dyn Fn(&str),
    ) -> Option<Box<dyn Backend>> {
        let title = &described.title;
        let id = setup.data.file_name().map(|n| n.to_string_lossy().into_owned()).unwrap_or_default();
        let name = format!("{id}-{name}");
        note(&setup.directory, &name);
        progress(&format!("preparing a container of {title} …"));
        let local = self.host == "127.0.0.1";
        let request = request
            .with_container_name(&name)
            .with_startup_timeout(PULL_PATIENCE)
            .with_mapped_port(host_port, port.tcp())
            .with_host_config_modifier(move |config| {
                // Else the engine opens the port to the whole network.
                let binding = PortBinding {
                    host_ip: local.then(|| "127.0.0.1".to_owned()),
                    host_port: Some(host_port.to_string()),
                };
                config.port_bindings = Some([(format!("{port}/tcp"), Some(vec![binding]))].into());
            });
        match self.runtime.block_on(request.start()) {
            Ok(container) => {
                Some(Box::new(ContainerServer { runtime: self.runtime, container: Some(container), described }))
            }
            Err(error) => {
                progress(&format!("no container of {title}: {error}; trying local processes"));
                // It may have been made and not started.
                self.remove(&name);
                None
            }
        }
    }
}

/// Writes a container's name down for [`remove_left_behind`], before it exists.
fn note(directory: &Path, name: &str) {
    let file = directory.join("containers");
    let names = fs::read_to_string(&file).unwrap_or_default();
    let _ = fs::write(&file, format!("{names}{name}\n"));
}

struct ContainerServer {
    runtime: Runtime,
    /// `Some` until it is dropped.
    container: Option<ContainerAsync<GenericImage>>,
    described: Described,
}

impl ContainerServer {
    fn is_running(&self) -> bool {
        let Some(container) = &self.container else { return false };
        self.runtime.block_on(container.is_running()).unwrap_or(false)
    }
}

impl Backend for ContainerServer {
    fn description(&self) -> String {
        format!("{} (container)", self.described.title)
    }

    fn address(&self) -> String {
        self.described.address.clone()
    }

    fn start(&mut self) -> Result<(), Failure> {
        let Some(container) = &self.container else { return Ok(()) };
        let what = self.description();
        if !self.is_running() {
            self.runtime
                .block_on(container.start())
                .map_err(|error| Failure::unreachable(format!("{what} does not start: {error}")))?;
        }
        let deadline = Instant::now() + Duration::from_secs(90);
        while !(self.described.ready)() {
            if Instant::now() >= deadline || !self.is_running() {
                let log = self.runtime.block_on(container.stderr_to_vec()).unwrap_or_default();
                let log = String::from_utf8_lossy(&log).into_owned();
                let last = log.lines().rev().take(15).collect::<Vec<_>>().into_iter().rev().collect::<Vec<_>>();
                return Err(Failure::unreachable(format!("{what} does not answer; its log:\n{}", last.join("\n"))));
            }
            std::thread::sleep(Duration::from_millis(50));
        }
        Ok(())
    }

    fn stop(&mut self, hard: bool) {
        if let Some(container) = &self.container {
            let _ = self.runtime.block_on(container.stop_with_timeout(Some(if hard { 0 } else { 20 })));
        }
    }

    fn is_alive(&mut self) -> bool {
        self.is_running() && (self.described.ready)()
    }

    fn pid(&self) -> Option<u32> {
        None
    }
}

impl Drop for ContainerServer {
    fn drop(&mut self) {
        if let Some(container) = self.container.take() {
            let _ = self.runtime.block_on(container.rm());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::variable;

    #[test]
    fn broker_settings_become_the_variables_of_the_image() {
        assert_eq!(variable("transaction.state.log.min.isr"), "KAFKA_TRANSACTION_STATE_LOG_MIN_ISR");
        assert_eq!(variable("a_b.c-d"), "KAFKA_A__B_C___D");
    }
}
