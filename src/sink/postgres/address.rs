//! Where the database is: the `url` of a sink, with the TLS settings that the driver does not know.

use std::fmt;
use std::net::IpAddr;
use std::time::Duration;

use tokio_postgres::Config;
use tokio_postgres::config::{Host, SslMode, TargetSessionAttrs};

/// How long an attempt to connect may take in all; a message must be out within 10 s of the start.
pub const CONNECT_TIMEOUT: Duration = Duration::from_secs(8);
const CONNECT_TIMEOUT_HOST: Duration = Duration::from_secs(5);

/// A parsed `url`. Printing it never shows the password.
#[derive(Clone)]
pub struct Address {
    pub config: Config,
    pub roots: Roots,
}

/// Whom to trust as a signer of server certificates.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Roots {
    /// What the machine trusts.
    System,
    /// The certificates of a PEM file, and nobody else.
    File(String),
}

impl Address {
    /// Reads `postgres://user:password@host:port/database?…`, or `key=value` words as libpq takes them. Without
    /// `sslmode`, a server on this machine is spoken to in plain text and any other by TLS; certificates and host
    /// names are always verified.
    ///
    /// # Errors
    /// What is wrong and what would do, without the password.
    pub fn parse(url: &str, application: &str) -> Result<Address, String> {
        let mut rest = url.to_owned();
        let mode = take_parameter(&mut rest, "sslmode");
        let root = take_parameter(&mut rest, "sslrootcert");
        let mut config: Config = rest.parse().map_err(|e| format!("url: {}", super::error::with_causes(&e)))?;

        let tcp = config.get_hosts().iter().filter_map(|h| if let Host::Tcp(h) = h { Some(h) } else { None });
        if tcp.clone().any(|h| h.contains('@')) {
            return Err("url: write a @ in user or password as %40".into());
        }
        if config.get_hosts().is_empty() && config.get_hostaddrs().is_empty() {
            return Err("url: it names no host, as in postgres://user@host:5432/database".into());
        }
        let here = tcp.clone().all(|h| is_here(h)) && config.get_hostaddrs().iter().all(IpAddr::is_loopback);
        config.ssl_mode(match mode.as_deref() {
            Some("disable") => SslMode::Disable,
            Some("prefer") => SslMode::Prefer,
            Some("require" | "verify-ca" | "verify-full") => SslMode::Require,
            None if here && root.is_none() => SslMode::Disable,
            None => SslMode::Require,
            Some(other) => {
                return Err(format!(
                    "url: sslmode {other:?} is none of disable, prefer, require, verify-ca, verify-full"
                ));
            }
        });
        config.target_session_attrs(TargetSessionAttrs::ReadWrite);
        if config.get_application_name().is_none() {
            config.application_name(application);
        }
        if config.get_connect_timeout().is_none() {
            config.connect_timeout(CONNECT_TIMEOUT_HOST / config.get_hosts().len().max(1) as u32);
        }
        // A peer that vanished without a word is noticed within a minute, not after the two hours of the default.
        config.keepalives_idle(config.get_keepalives_idle().min(Duration::from_secs(30)));
        config.keepalives_interval(config.get_keepalives_interval().unwrap_or(Duration::from_secs(10)));
        config.keepalives_retries(config.get_keepalives_retries().unwrap_or(3));
        config.tcp_user_timeout(config.get_tcp_user_timeout().copied().unwrap_or(Duration::from_secs(30)));

        let roots = match root {
            None => Roots::System,
            Some(path) if path == "system" => Roots::System,
            Some(path) => Roots::File(path),
        };
        Ok(Address { config, roots })
    }

    pub fn tls(&self) -> bool {
        self.config.get_ssl_mode() != SslMode::Disable
    }
}

/// `user@host:port/database`.
impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let config = &self.config;
        if let Some(user) = config.get_user() {
            write!(f, "{user}@")?;
        }
        let hosts = config.get_hosts().iter().map(|h| match h {
            Host::Tcp(name) => name.clone(),
            Host::Unix(path) => path.display().to_string(),
        });
        let addresses = config.get_hostaddrs().iter().map(IpAddr::to_string);
        let names: Vec<String> = if config.get_hosts().is_empty() { addresses.collect() } else { hosts.collect() };
        for (at, name) in names.iter().enumerate() {
            let port = config.get_ports().get(at).or(config.get_ports().first()).unwrap_or(&5432);
            write!(f, "{}{name}:{port}", if at > 0 { "," } else { "" })?;
        }
        write!(f, "/{}", config.get_dbname().or(config.get_user()).unwrap_or_default())
    }
}

impl fmt::Debug for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Address({self})")
    }
}

fn is_here(host: &str) -> bool {
    host == "localhost" || host.parse::<IpAddr>().is_ok_and(|ip| ip.is_loopback())
}

/// Takes `name=value` out of a URL's query or a list of words, since the driver refuses what it does not know.
fn take_parameter(url: &mut String, name: &str) -> Option<String> {
    let is_url = url.starts_with("postgres://") || url.starts_with("postgresql://");
    // A question mark may stand in a password, which ends at the first @.
    let start = if is_url { url.find('@').unwrap_or(0) } else { 0 };
    let start = if is_url { start + url[start..].find('?')? + 1 } else { 0 };
    let separator = |c: char| if is_url { c == '&' } else { c.is_whitespace() };
    let prefix = format!("{name}=");
    let mut at = start;
    for word in url[start..].split(separator) {
        let Some(value) = word.strip_prefix(&prefix) else {
            at += word.len() + 1;
            continue;
        };
        let value = if is_url { percent_decoded(value)? } else { value.trim_matches('\'').to_owned() };
        // With its separator, behind or in front.
        let range = if at + word.len() < url.len() { at..at + word.len() + 1 } else { at.saturating_sub(1)..url.len() };
        url.replace_range(range, "");
        return Some(value);
    }
    None
}

/// By the driver's own decoder.
fn percent_decoded(value: &str) -> Option<String> {
    let config: Config = format!("postgres:///?application_name={value}").parse().ok()?;
    config.get_application_name().map(str::to_owned)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(url: &str) -> Address {
        Address::parse(url, "job").unwrap()
    }

    #[test]
    fn the_network_gets_tls_and_this_machine_does_not_need_it() {
        let mode = |url: &str| parse(url).config.get_ssl_mode();
        assert_eq!(mode("postgres://u@localhost/d"), SslMode::Disable);
        assert_eq!(mode("postgres://u@127.0.0.1:5433/d"), SslMode::Disable);
        assert_eq!(mode("postgres://u@[::1]/d"), SslMode::Disable);
        assert_eq!(mode("postgres:///d?host=/var/run/postgresql"), SslMode::Disable);
        assert_eq!(mode("postgres://u@db.example/d"), SslMode::Require);
        assert_eq!(mode("postgres://u@localhost,db.example/d"), SslMode::Require);
        assert_eq!(mode("postgres://u@db.example/d?sslmode=disable"), SslMode::Disable);
        assert_eq!(mode("postgres://u@localhost/d?sslmode=verify-full"), SslMode::Require);
        assert_eq!(mode("postgres://u@localhost/d?sslrootcert=/ca.pem"), SslMode::Require);
        assert_eq!(mode("host=localhost sslmode=prefer user=u"), SslMode::Prefer);
    }

    #[test]
    fn tls_parameters_are_taken_out_wherever_they_stand() {
        for url in [
            "postgres://u:p?x@h:1/d?sslmode=verify-ca&sslrootcert=/a%20b.pem&connect_timeout=3",
            "postgres://u:p?x@h:1/d?connect_timeout=3&sslrootcert=/a b.pem&sslmode=require",
            "postgres://u:p?x@h:1/d?sslrootcert=%2Fa%20b.pem&connect_timeout=3",
        ] {
            let address = parse(url);
            assert_eq!(address.roots, Roots::File("/a b.pem".into()), "{url}");
            assert_eq!(address.config.get_connect_timeout(), Some(&Duration::from_secs(3)), "{url}");
            assert_eq!(address.config.get_password(), Some(&b"p?x"[..]), "{url}");
        }
        let address = parse("host=h sslrootcert=/ca.pem password='a b' sslmode=require");
        assert_eq!(address.roots, Roots::File("/ca.pem".into()));
        assert_eq!(address.config.get_password(), Some(&b"a b"[..]));
        assert_eq!(parse("postgres://h/d?sslrootcert=system").roots, Roots::System);
    }

    #[test]
    fn no_message_and_no_print_shows_the_password() {
        let address = parse("postgres://u:s3cret@h1:1,h2:2/d?sslmode=disable");
        assert_eq!(address.to_string(), "u@h1:1,h2:2/d");
        assert!(!format!("{address:?}").contains("s3cret"));
        for url in [
            "postgres://u:s3@cret@h/d",
            "postgres://u:s3cret@h/d?sslmode=allow",
            "postgres://u:s3cret@h/d?nonsense=1",
            "postgres://u:s3cret@/d",
            "user=u password=s3cret dbname=d",
        ] {
            let message = Address::parse(url, "job").unwrap_err();
            assert!(!message.contains("cret"), "{message}");
            assert!(message.starts_with("url: "), "{message}");
        }
    }
}
