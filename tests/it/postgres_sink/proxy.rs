//! A proxy that loses the connection round a COMMIT.

use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream, ToSocketAddrs};
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;

use semel::sink::postgres::Address;

/// Where a COMMIT gets lost.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cut {
    /// The server never sees it.
    Before,
    /// The server has done it, the answer is lost.
    After,
    /// The server never sees it, and the connection stays.
    Silent,
}

/// The cut that is to be made, and how often.
type Rule = Mutex<(Cut, u32)>;

/// Forwards to `server`; the next COMMITs that pass cut their connection.
pub struct Proxy {
    pub address: SocketAddr,
    rule: Arc<Rule>,
}

impl Proxy {
    /// A proxy before the server of a url.
    pub fn to(url: &str, cut: Cut, times: u32) -> Proxy {
        let server = ("127.0.0.1", port(url)).to_socket_addrs().unwrap().next().unwrap();
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let rule = Arc::new(Mutex::new((cut, times)));
        let shared = Arc::clone(&rule);
        thread::spawn(move || {
            for client in listener.incoming().flatten() {
                let Ok(server) = TcpStream::connect(server) else { continue };
                let rule = Arc::clone(&shared);
                thread::spawn(move || forward(client, server, &rule));
            }
        });
        Proxy { address, rule }
    }

    /// The url with this proxy in the place of its server.
    pub fn url(&self, url: &str) -> String {
        let (port, here) = (port(url), self.address.to_string());
        url.replace(&format!("127.0.0.1:{port}"), &here).replace(&format!("localhost:{port}"), &here)
    }

    /// The next COMMIT meets this cut.
    pub fn next(&self, cut: Cut) {
        *self.rule.lock().unwrap() = (cut, 1);
    }

    /// Whether all cuts were made.
    pub fn done(&self) -> bool {
        self.rule.lock().unwrap().1 == 0
    }
}

fn port(url: &str) -> u16 {
    Address::parse(url, "x").unwrap().config.get_ports().first().copied().unwrap_or(5432)
}

fn forward(mut client: TcpStream, mut server: TcpStream, rule: &Rule) {
    let (mut answers, mut back) = (server.try_clone().unwrap(), client.try_clone().unwrap());
    let commits = Arc::new(AtomicU32::new(0));
    let cutting = Arc::clone(&commits);
    let silent = Arc::new(AtomicBool::new(false));
    let saying_nothing = Arc::clone(&silent);
    thread::spawn(move || {
        let mut buffer = [0; 65536];
        while let Ok(n @ 1..) = answers.read(&mut buffer) {
            if saying_nothing.load(Ordering::SeqCst) {
                continue;
            }
            // The answer to a COMMIT is here: it was done.
            if cutting.load(Ordering::SeqCst) > 0 || back.write_all(&buffer[..n]).is_err() {
                break;
            }
        }
        if !saying_nothing.load(Ordering::SeqCst) {
            let _ = (answers.shutdown(Shutdown::Both), back.shutdown(Shutdown::Both));
        }
    });
    let mut buffer = [0; 65536];
    while let Ok(n @ 1..) = client.read(&mut buffer) {
        let commit = buffer[..n].windows(7).any(|w| w == b"COMMIT\0");
        match if commit { cut(rule) } else { None } {
            Some(Cut::Before) => break,
            Some(Cut::Silent) => {
                silent.store(true, Ordering::SeqCst);
                continue;
            }
            Some(Cut::After) => commits.fetch_add(1, Ordering::SeqCst),
            None => 0,
        };
        if server.write_all(&buffer[..n]).is_err() {
            break;
        }
    }
    // The server's side closes by itself once the answer to a COMMIT has come.
    if commits.load(Ordering::SeqCst) == 0 {
        let _ = (client.shutdown(Shutdown::Both), server.shutdown(Shutdown::Both));
    }
}

/// What a COMMIT meets.
fn cut(rule: &Rule) -> Option<Cut> {
    let mut rule = rule.lock().unwrap();
    let (cut, left) = *rule;
    rule.1 = left.checked_sub(1)?;
    Some(cut)
}
