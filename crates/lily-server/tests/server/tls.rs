//! Encrypted connections.

use std::fs;
use std::path::PathBuf;
use std::sync::Arc;

use lily_server::tls::{Tls, TlsError};
use rcgen::{CertifiedKey, generate_simple_self_signed};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::time::timeout;
use tokio_rustls::TlsConnector;
use tokio_rustls::rustls::crypto::ring;
use tokio_rustls::rustls::pki_types::ServerName;
use tokio_rustls::rustls::{ClientConfig, RootCertStore};

use crate::fixture::{Script, TestServer, question};
use crate::http::{PATIENCE, chat};

struct Files {
    folder: tempfile::TempDir,
    roots: RootCertStore,
}

impl Files {
    /// A certificate for localhost, its key, and the key of another.
    fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let make = || generate_simple_self_signed(["localhost".to_owned()]).unwrap();
        let (CertifiedKey { cert, signing_key }, other) = (make(), make());
        fs::write(folder.path().join("cert.pem"), cert.pem()).unwrap();
        fs::write(folder.path().join("key.pem"), signing_key.serialize_pem()).unwrap();
        fs::write(folder.path().join("other.pem"), other.signing_key.serialize_pem()).unwrap();
        let mut roots = RootCertStore::empty();
        roots.add(cert.der().clone()).unwrap();
        Self { folder, roots }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn load(&self, cert: &str, key: &str) -> Result<Tls, TlsError> {
        Tls::load(&self.path(cert), &self.path(key))
    }
}

#[tokio::test]
async fn answers_come_over_tls() {
    let files = Files::new();
    let tls = files.load("cert.pem", "key.pem").unwrap();
    let script = Script::new().reply("a</think>sealed");
    let server = TestServer::start_with(script, |state| state.tls = Some(tls)).await;
    let config = ClientConfig::builder_with_provider(Arc::new(ring::default_provider()))
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_root_certificates(files.roots)
        .with_no_client_auth();
    let stream = TcpStream::connect(server.address).await.unwrap();
    let name = ServerName::try_from("localhost").unwrap();
    let mut stream = TlsConnector::from(Arc::new(config)).connect(name, stream).await.unwrap();
    stream.write_all(&chat(&question())).await.unwrap();
    let mut received = String::new();
    timeout(PATIENCE, stream.read_to_string(&mut received)).await.unwrap().unwrap();
    assert!(received.starts_with("HTTP/1.1 200") && received.contains("sealed"), "{received}");
}

#[tokio::test]
async fn who_does_not_speak_tls_gets_nothing() {
    let files = Files::new();
    let tls = files.load("cert.pem", "key.pem").unwrap();
    let server = TestServer::start_with(Script::new(), |state| state.tls = Some(tls)).await;
    let mut stream = TcpStream::connect(server.address).await.unwrap();
    stream.write_all(&chat(&question())).await.unwrap();
    let mut received = Vec::new();
    // The end may come as a reset.
    let _ = timeout(PATIENCE, stream.read_to_end(&mut received)).await.expect("the server closes");
    assert!(!String::from_utf8_lossy(&received).contains("HTTP"), "{received:?}");
}

#[test]
fn unfit_files_are_named() {
    let files = Files::new();
    for (cert, key, words) in [
        ("absent.pem", "key.pem", ["absent.pem", "certificates"]),
        ("cert.pem", "absent.pem", ["absent.pem", "a private key"]),
        ("key.pem", "key.pem", ["key.pem", "certificates"]),
        ("cert.pem", "cert.pem", ["cert.pem", "a private key"]),
        ("cert.pem", "other.pem", ["other.pem", "can't be used with"]),
    ] {
        let error = files.load(cert, key).err().unwrap().to_string();
        assert!(words.iter().all(|word| error.contains(word)), "{error}");
    }
}
