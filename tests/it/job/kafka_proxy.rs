//! A proxy before a broker that cuts or holds up single requests, by their kind.

use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Duration;

/// Kinds of requests: the protocol's API keys.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(i16)]
pub enum Kind {
    Produce = 0,
    Fetch = 1,
    Metadata = 3,
    OffsetFetch = 9,
    JoinGroup = 11,
    Heartbeat = 12,
    SyncGroup = 14,
    InitProducerId = 22,
    AddPartitionsToTxn = 24,
    AddOffsetsToTxn = 25,
    EndTxn = 26,
    TxnOffsetCommit = 28,
}

/// What happens to a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// The connection breaks before the broker has it.
    CutBefore,
    /// The broker has carried it out, the answer is lost with the connection.
    CutAfter,
    /// It reaches the broker that much later.
    Delay(Duration),
}

/// The fault that waits for its request.
type Rules = Mutex<Option<(Kind, Fault)>>;

/// Forwards to a broker. Requests of clients whose id begins with `semel-tests` always pass.
pub struct KafkaProxy {
    pub address: SocketAddr,
    broker: Arc<Mutex<Option<SocketAddr>>>,
    rules: Arc<Rules>,
}

impl KafkaProxy {
    /// Listens; connections are refused until [`forward_to`](KafkaProxy::forward_to).
    pub fn start() -> KafkaProxy {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let broker = Arc::new(Mutex::new(None::<SocketAddr>));
        let rules = Arc::new(Rules::default());
        let (to, shared) = (Arc::clone(&broker), Arc::clone(&rules));
        thread::spawn(move || {
            for client in listener.incoming().flatten() {
                let Some(broker) = *to.lock().unwrap() else { continue };
                let Ok(server) = TcpStream::connect(broker) else { continue };
                client.set_nodelay(true).unwrap();
                server.set_nodelay(true).unwrap();
                let rules = Arc::clone(&shared);
                thread::spawn(move || forward(client, server, &rules));
            }
        });
        KafkaProxy { address, broker, rules }
    }

    pub fn forward_to(&self, broker: &str) {
        *self.broker.lock().unwrap() = Some(broker.parse().unwrap());
    }

    /// The next request of that kind meets this fault.
    pub fn next(&self, kind: Kind, fault: Fault) {
        *self.rules.lock().unwrap() = Some((kind, fault));
    }

    /// Whether the last fault asked for has happened.
    pub fn done(&self) -> bool {
        self.rules.lock().unwrap().is_none()
    }
}

/// Requests go frame by frame, answers as they come.
fn forward(mut client: TcpStream, mut server: TcpStream, rules: &Rules) {
    let (mut answers, mut back) = (server.try_clone().unwrap(), client.try_clone().unwrap());
    let answering = thread::spawn(move || {
        let _ = std::io::copy(&mut answers, &mut back);
        let _ = back.shutdown(Shutdown::Both);
    });
    while let Some(frame) = read_frame(&mut client) {
        let fault = fault(&frame, rules);
        match fault {
            Some(Fault::CutBefore) => break,
            Some(Fault::CutAfter) => {
                // No answer passes from here on: the client's side is closed first.
                let _ = client.shutdown(Shutdown::Both);
                let _ = server.write_all(&frame);
                // The broker closes once it has read the end of the stream, after what came before it.
                let _ = server.shutdown(Shutdown::Write);
                let _ = answering.join();
                return;
            }
            Some(Fault::Delay(by)) => thread::park_timeout(by),
            None => {}
        }
        if server.write_all(&frame).is_err() {
            break;
        }
    }
    let _ = server.shutdown(Shutdown::Both);
    let _ = client.shutdown(Shutdown::Both);
    let _ = answering.join();
}

/// A request with its length.
fn read_frame(stream: &mut TcpStream) -> Option<Vec<u8>> {
    let mut length = [0; 4];
    stream.read_exact(&mut length).ok()?;
    let size = usize::try_from(i32::from_be_bytes(length)).ok()?;
    let mut frame = vec![0; 4 + size];
    frame[..4].copy_from_slice(&length);
    stream.read_exact(&mut frame[4..]).ok()?;
    Some(frame)
}

/// Length, kind, version, correlation id, then the client's id.
fn fault(frame: &[u8], rules: &Rules) -> Option<Fault> {
    let kind = i16::from_be_bytes(frame.get(4..6)?.try_into().ok()?);
    let size = i16::from_be_bytes(frame.get(12..14)?.try_into().ok()?);
    let id = frame.get(14..14 + usize::try_from(size).unwrap_or(0)).unwrap_or_default();
    let mut rules = rules.lock().unwrap();
    let (asked, fault) = (*rules)?;
    if asked as i16 != kind || id.starts_with(b"semel-tests") {
        return None;
    }
    *rules = None;
    Some(fault)
}
