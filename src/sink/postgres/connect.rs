//! One connection, owned by its writer: no pool, since a connection whose transaction was left open must not reach
//! anybody else.

use std::time::Duration;

use rustls::pki_types::CertificateDer;
use rustls::pki_types::pem::PemObject;
use rustls::{ClientConfig, RootCertStore};
use tokio::task::JoinHandle;
use tokio::time::timeout;
use tokio_postgres::tls::{MakeTlsConnect, TlsConnect};
use tokio_postgres::{Client, NoTls, SimpleQueryMessage, Socket, Statement};
use tokio_postgres_rustls::MakeRustlsConnect;

use super::address::{Address, CONNECT_TIMEOUT, Roots};
use super::error::Error;

/// Settings of a session or (behind a pooler, where `SET` would leak to others) a transaction.
pub const SETTINGS: [(&str, &str); 4] = [
    ("statement_timeout", "30s"),
    ("lock_timeout", "5s"),
    // A writer that was stopped in the middle must not hold its locks for long.
    ("idle_in_transaction_session_timeout", "10s"),
    // A plan made while the table was small would read all of it when it has grown.
    ("plan_cache_mode", "force_custom_plan"),
];

/// An open connection.
pub struct Connection {
    pub(super) client: Client,
    /// Whether statements are prepared once and settings made for the session.
    pub(super) prepared: bool,
    /// A transaction may be open that nobody owns any more: roll it back before the next.
    pub(super) dirty: bool,
    /// Prepared statements by their texts.
    pub(super) statements: Vec<(String, Statement)>,
    driver: JoinHandle<()>,
}

impl Connection {
    /// Connects to the first host that answers and takes writes, within 8 seconds. Runs on the caller's runtime.
    ///
    /// # Errors
    /// With where it was going and what stood in the way, without the password.
    pub async fn open(address: &Address, prepared: bool) -> Result<Connection, Error> {
        let (client, driver) = opened(address).await?;
        let connection = Connection { client, prepared, dirty: false, statements: Vec::new(), driver };
        if prepared {
            let settings: String = SETTINGS.iter().map(|(name, value)| format!("SET {name} = '{value}';")).collect();
            connection.client.batch_execute(&settings).await.map_err(|e| placed(connection.error(&e), address))?;
        }
        Ok(connection)
    }

    /// Connects with settings that worked before: a certificate, a name that does not resolve will be mended.
    pub async fn reopen(address: &Address, prepared: bool) -> Result<Connection, Error> {
        Connection::open(address, prepared).await.map_err(|error| match error {
            Error::Client(message) => Error::Connection(message),
            other => other,
        })
    }

    /// The server's timeline, which each promotion of a standby begins anew. `None`: the server does not tell.
    pub async fn timeline(&self) -> Option<String> {
        let asked = self.client.simple_query("SELECT substr(pg_walfile_name(pg_current_wal_lsn()), 1, 8)");
        let messages = timeout(ANSWER_TIMEOUT, asked).await.ok()?.ok()?;
        messages.into_iter().find_map(|message| match message {
            SimpleQueryMessage::Row(row) => row.get(0).map(str::to_owned),
            _ => None,
        })
    }

    /// Ends the session, waiting a second at most for the goodbye to be sent.
    pub async fn close(self) {
        drop(self.client);
        let _ = timeout(Duration::from_secs(1), self.driver).await;
    }

    pub fn is_closed(&self) -> bool {
        self.client.is_closed()
    }

    pub(super) fn error(&self, error: &tokio_postgres::Error) -> Error {
        Error::new(error, self.client.is_closed())
    }
}

/// A plain session, for whoever looks at a table: no limits are set.
///
/// # Errors
/// As [`Connection::open`].
pub async fn session(address: &Address) -> Result<Client, Error> {
    opened(address).await.map(|(client, _)| client)
}

async fn opened(address: &Address) -> Result<(Client, JoinHandle<()>), Error> {
    let result = timeout(CONNECT_TIMEOUT, connect(address)).await;
    let result =
        result.unwrap_or_else(|_| Err(Error::Connection(format!("no answer within {} s", CONNECT_TIMEOUT.as_secs()))));
    result.map_err(|error| placed(error, address))
}

fn placed(error: Error, address: &Address) -> Error {
    error.context(&format!("cannot connect to {address}"))
}

async fn connect(address: &Address) -> Result<(Client, JoinHandle<()>), Error> {
    if !address.tls() {
        return connect_by(address, NoTls).await;
    }
    connect_by(address, tls(&address.roots).map_err(Error::Client)?).await.map_err(|error| match error {
        Error::Client(message) if message.contains("does not support TLS") => {
            Error::Client(format!("{message}; if the network is trusted, say sslmode=disable in the url"))
        }
        other => other,
    })
}

async fn connect_by<T>(address: &Address, tls: T) -> Result<(Client, JoinHandle<()>), Error>
where
    T: MakeTlsConnect<Socket>,
    T::Stream: Send + 'static,
    <T::TlsConnect as TlsConnect<Socket>>::Future: Send,
{
    let (client, connection) = address.config.connect(tls).await.map_err(|e| Error::connecting(&e))?;
    let driver = tokio::spawn(async move {
        // Queries only learn that the connection closed; why is known here alone.
        if let Err(error) = connection.await {
            tracing::debug!(error = %super::error::with_causes(&error), "the database connection ended");
        }
    });
    Ok((client, driver))
}

fn tls(roots: &Roots) -> Result<MakeRustlsConnect, String> {
    // Another provider may have been installed by whoever embeds the library: that one is as good.
    let _ = rustls::crypto::ring::default_provider().install_default();
    let Roots::File(path) = roots else {
        return match MakeRustlsConnect::with_native_certs() {
            Ok((tls, _)) => Ok(tls),
            Err(_) => Err("this machine has no trusted certificates; name a PEM file by sslrootcert in the url".into()),
        };
    };
    let mut store = RootCertStore::empty();
    let certificates = CertificateDer::pem_file_iter(path).map_err(|e| format!("sslrootcert {path}: {e}"))?;
    for certificate in certificates {
        let certificate = certificate.map_err(|e| format!("sslrootcert {path}: {e}"))?;
        store.add(certificate).map_err(|e| format!("sslrootcert {path}: {e}"))?;
    }
    if store.is_empty() {
        return Err(format!("sslrootcert {path}: it holds no certificate"));
    }
    Ok(MakeRustlsConnect::new(ClientConfig::builder().with_root_certificates(store).with_no_client_auth()))
}

/// Longer than the server's own limit: past it the server is not there any more.
pub const ANSWER_TIMEOUT: Duration = Duration::from_secs(45);
