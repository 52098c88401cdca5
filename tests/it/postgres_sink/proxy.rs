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

/// Forwards to `server`; the next so many COMMITs that pass cut their connection.
pub struct Proxy {
    pub address: SocketAddr,
    cuts: Arc<Cuts>,
}

type Cuts = Mutex<(Cut, u32)>;

impl Proxy {
    pub fn start(server: SocketAddr, cut: Cut, times: u32) -> Proxy {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let cuts = Arc::new(Mutex::new((cut, times)));
        let shared = Arc::clone(&cuts);
        thread::spawn(move || {
            for client in listener.incoming().flatten() {
                let Ok(server) = TcpStream::connect(server) else { continue };
                let cuts = Arc::clone(&shared);
                thread::spawn(move || forward(client, server, &cuts));
            }
        });
        Proxy { address, cuts }
    }

    /// A proxy before the server of a url.
    pub fn to(url: &str, cut: Cut, times: u32) -> Proxy {
        let server = ("127.0.0.1", port(url)).to_socket_addrs().unwrap().next().unwrap();
        Proxy::start(server, cut, times)
    }

    /// The url with this proxy in the place of its server.
    pub fn url(&self, url: &str) -> String {
        let (port, here) = (port(url), self.address.to_string());
        url.replace(&format!("127.0.0.1:{port}"), &here).replace(&format!("localhost:{port}"), &here)
    }

    /// Cuts the next so many COMMITs.
    pub fn next(&self, cut: Cut, times: u32) {
        *self.cuts.lock().unwrap() = (cut, times);
    }

    /// Whether all cuts were made.
    pub fn done(&self) -> bool {
        self.cuts.lock().unwrap().1 == 0
    }
}

fn port(url: &str) -> u16 {
    Address::parse(url, "x").unwrap().config.get_ports().first().copied().unwrap_or(5432)
}

/// How the COMMIT at hand is to be cut, if it is.
fn take(cuts: &Cuts) -> Option<Cut> {
    let mut cuts = cuts.lock().unwrap();
    let left = cuts.1.checked_sub(1)?;
    cuts.1 = left;
    Some(cuts.0)
}

fn forward(mut client: TcpStream, mut server: TcpStream, cuts: &Cuts) {
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
        match if commit { take(cuts) } else { None } {
            Some(Cut::Before) => break,
            Some(Cut::Silent) => {
                silent.store(true, Ordering::SeqCst);
                continue;
            }
            Some(Cut::After) => drop(commits.fetch_add(1, Ordering::SeqCst)),
            None => {}
        }
        if server.write_all(&buffer[..n]).is_err() {
            break;
        }
    }
    // The server's side closes by itself once the answer to a COMMIT has come.
    if commits.load(Ordering::SeqCst) == 0 {
        let _ = (client.shutdown(Shutdown::Both), server.shutdown(Shutdown::Both));
    }
}
