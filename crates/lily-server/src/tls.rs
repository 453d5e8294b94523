//! TLS, with a certificate and a key from files.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use tokio_rustls::TlsAcceptor;
use tokio_rustls::rustls::crypto::ring;
use tokio_rustls::rustls::pki_types::pem::{self, PemObject};
use tokio_rustls::rustls::pki_types::{CertificateDer, PrivateKeyDer};
use tokio_rustls::rustls::{self, ServerConfig};

/// Why connections can't be encrypted.
#[derive(Debug, thiserror::Error)]
pub enum TlsError {
    /// A file can't be read, or is of another kind.
    #[error("{path}: expected {expected} in PEM form: {source}")]
    File {
        /// The file.
        path: PathBuf,
        /// What it should hold.
        expected: &'static str,
        /// What is wrong.
        source: pem::Error,
    },
    /// Certificate and key can't be used together.
    #[error("the certificate {cert} can't be used with the key {key}: {source}")]
    Pair {
        /// File of the certificate.
        cert: PathBuf,
        /// File of the key.
        key: PathBuf,
        /// What is wrong.
        source: rustls::Error,
    },
}

/// Takes connections that are encrypted.
#[derive(Clone)]
pub struct Tls(pub(crate) TlsAcceptor);

impl Tls {
    /// Reads a chain of certificates, the server's own first, and its private key, both in PEM form.
    pub fn load(cert: &Path, key: &Path) -> Result<Self, TlsError> {
        let file = |path: &Path, expected| {
            let path = path.to_owned();
            move |source| TlsError::File { path, expected, source }
        };
        let chain: Result<Vec<_>, _> = CertificateDer::pem_file_iter(cert).and_then(Iterator::collect);
        let chain =
            chain.and_then(|chain| if chain.is_empty() { Err(pem::Error::NoItemsFound) } else { Ok(chain) });
        let chain = chain.map_err(file(cert, "certificates"))?;
        let secret = PrivateKeyDer::from_pem_file(key).map_err(file(key, "a private key"))?;
        let pair = |source| TlsError::Pair { cert: cert.to_owned(), key: key.to_owned(), source };
        let mut config = ServerConfig::builder_with_provider(Arc::new(ring::default_provider()))
            .with_safe_default_protocol_versions()
            .map_err(pair)?
            .with_no_client_auth()
            .with_single_cert(chain, secret)
            .map_err(pair)?;
        config.alpn_protocols = vec![b"http/1.1".to_vec()];
        Ok(Self(TlsAcceptor::from(Arc::new(config))))
    }
}
