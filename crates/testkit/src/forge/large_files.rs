//! The forge's large files: the batch API of git-lfs and its basic transfer.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use bytes::Bytes;
use http::{HeaderValue, Method, Response, StatusCode};
use serde_json::{Value, json};
use sha2::{Digest, Sha256};

/// The large files of all repositories.
#[derive(Clone, Default)]
pub(super) struct LargeFiles(Arc<Mutex<Kept>>);

#[derive(Default)]
struct Kept {
    files: HashMap<String, Bytes>,
    /// The host that keeps them, where it is another one.
    elsewhere: Option<String>,
}

/// What is asked.
pub(super) enum Errand {
    /// Where to put files, or to get them. With what stands before `/info/lfs/`.
    Batch(String),
    /// To keep one.
    Put(String),
    /// To give one.
    Get(String),
    /// Anything else, such as locks, which a server need not have.
    Other,
}

impl Errand {
    /// What a request asks, where it is about large files.
    pub(super) fn of(head: &http::request::Parts) -> Option<Self> {
        let path = head.uri.path();
        if let Some((_, oid)) = path.rsplit_once("/gitlab-lfs/objects/") {
            let oid = oid.to_owned();
            return match head.method {
                Method::PUT => Some(Self::Put(oid)),
                Method::GET => Some(Self::Get(oid)),
                _ => Some(Self::Other),
            };
        }
        let (repository, rest) = path.split_once("/info/lfs/")?;
        if (&head.method, rest) != (&Method::POST, "objects/batch") {
            return Some(Self::Other);
        }
        let host = head.headers.get("host");
        let host = host.and_then(|host| host.to_str().ok()).unwrap_or_default();
        Some(Self::Batch(format!("https://{host}{repository}")))
    }
}

impl LargeFiles {
    pub(super) fn keep_at(&self, host: &str) {
        self.kept().elsewhere = Some(host.to_owned());
    }

    pub(super) fn get(&self, oid: &str) -> Option<Bytes> {
        self.kept().files.get(oid).cloned()
    }

    pub(super) fn respond(&self, errand: &Errand, body: Bytes) -> Response<Bytes> {
        match errand {
            Errand::Batch(repository) => match serde_json::from_slice(&body) {
                Ok(batch) => told(StatusCode::OK, &self.batch(repository, &batch)),
                Err(error) => refused(StatusCode::UNPROCESSABLE_ENTITY, &error.to_string()),
            },
            Errand::Put(oid) if *oid == name(&body) => {
                self.kept().files.insert(oid.clone(), body);
                Response::new(Bytes::new())
            }
            Errand::Put(_) => refused(StatusCode::UNPROCESSABLE_ENTITY, "not that file"),
            Errand::Get(oid) => match self.get(oid) {
                Some(file) => Response::new(file),
                None => refused(StatusCode::NOT_FOUND, "no such file"),
            },
            Errand::Other => refused(StatusCode::NOT_FOUND, "not built"),
        }
    }

    /// For each file, where it is put or got; nothing for one to be put that is there already.
    fn batch(&self, repository: &str, batch: &Value) -> Value {
        let kept = self.kept();
        let at = match &kept.elsewhere {
            Some(host) => format!("https://{host}"),
            None => repository.to_owned(),
        };
        let asked = batch["objects"].as_array().into_iter().flatten();
        let objects: Vec<Value> = asked
            .map(|object| {
                let oid = object["oid"].as_str().unwrap_or_default();
                let size = &object["size"];
                let action = json!({"href": format!("{at}/gitlab-lfs/objects/{oid}")});
                match (batch["operation"] == "upload", kept.files.get(oid)) {
                    (true, None) => {
                        json!({"oid": oid, "size": size, "actions": {"upload": action}})
                    }
                    (true, Some(_)) => json!({"oid": oid, "size": size}),
                    (false, Some(_)) => {
                        json!({"oid": oid, "size": size, "actions": {"download": action}})
                    }
                    (false, None) => {
                        let error = json!({"code": 404, "message": "no such file"});
                        json!({"oid": oid, "size": size, "error": error})
                    }
                }
            })
            .collect();
        json!({"transfer": "basic", "objects": objects})
    }

    fn kept(&self) -> MutexGuard<'_, Kept> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// What a file is called: its SHA-256.
fn name(file: &[u8]) -> String {
    let digest = Sha256::digest(file);
    digest.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn told(status: StatusCode, value: &Value) -> Response<Bytes> {
    let mut response = Response::new(Bytes::from(value.to_string()));
    *response.status_mut() = status;
    let kind = HeaderValue::from_static("application/vnd.git-lfs+json");
    response.headers_mut().insert("content-type", kind);
    response
}

fn refused(status: StatusCode, message: &str) -> Response<Bytes> {
    told(status, &json!({"message": message}))
}
