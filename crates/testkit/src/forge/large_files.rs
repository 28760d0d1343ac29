//! LFS objects of the forge: the batch API of git-lfs and its basic transfer.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use bytes::Bytes;
use http::{HeaderValue, Method, Response, StatusCode};
use serde_json::{Value, json};
use sha2::{Digest, Sha256};

/// The LFS objects of all repositories.
#[derive(Clone, Default)]
pub(super) struct LargeFiles(Arc<Mutex<LfsStore>>);

#[derive(Default)]
struct LfsStore {
    files: HashMap<String, Bytes>,
    /// The host that stores the objects, if it is not the forge.
    other_host: Option<String>,
}

/// A request about LFS objects.
pub(super) enum LfsRequest {
    /// `objects/batch`, with the URL of the repository (the part before `/info/lfs/`).
    Batch(String),
    /// Upload of the object with this id.
    Put(String),
    /// Download of the object with this id.
    Get(String),
    /// Any other request, such as locks, which are optional.
    Other,
}

impl LfsRequest {
    /// Parses the request; none if it is not about LFS objects.
    pub(super) fn from_head(head: &http::request::Parts) -> Option<Self> {
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
    pub(super) fn store_at(&self, host: &str) {
        self.store().other_host = Some(host.to_owned());
    }

    pub(super) fn get(&self, oid: &str) -> Option<Bytes> {
        self.store().files.get(oid).cloned()
    }

    pub(super) fn respond(&self, lfs_request: &LfsRequest, body: Bytes) -> Response<Bytes> {
        match lfs_request {
            LfsRequest::Batch(repository) => match serde_json::from_slice(&body) {
                Ok(batch) => json_response(StatusCode::OK, &self.batch(repository, &batch)),
                Err(error) => error_response(StatusCode::UNPROCESSABLE_ENTITY, &error.to_string()),
            },
            LfsRequest::Put(oid) if *oid == object_id(&body) => {
                self.store().files.insert(oid.clone(), body);
                Response::new(Bytes::new())
            }
            LfsRequest::Put(_) => error_response(
                StatusCode::UNPROCESSABLE_ENTITY,
                "the content does not have this id",
            ),
            LfsRequest::Get(oid) => match self.get(oid) {
                Some(file) => Response::new(file),
                None => error_response(StatusCode::NOT_FOUND, "no such file"),
            },
            LfsRequest::Other => error_response(StatusCode::NOT_FOUND, "not implemented"),
        }
    }

    /// The upload or download URL of each object; no URL for an upload of an existing object.
    fn batch(&self, repository: &str, batch: &Value) -> Value {
        let store = self.store();
        let at = match &store.other_host {
            Some(host) => format!("https://{host}"),
            None => repository.to_owned(),
        };
        let requested = batch["objects"].as_array().into_iter().flatten();
        let objects: Vec<Value> = requested
            .map(|object| {
                let oid = object["oid"].as_str().unwrap_or_default();
                let size = &object["size"];
                let action = json!({"href": format!("{at}/gitlab-lfs/objects/{oid}")});
                match (batch["operation"] == "upload", store.files.get(oid)) {
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

    fn store(&self) -> MutexGuard<'_, LfsStore> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The id of an object: its SHA-256.
fn object_id(file: &[u8]) -> String {
    let digest = Sha256::digest(file);
    digest.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn json_response(status: StatusCode, value: &Value) -> Response<Bytes> {
    let mut response = Response::new(Bytes::from(value.to_string()));
    *response.status_mut() = status;
    let kind = HeaderValue::from_static("application/vnd.git-lfs+json");
    response.headers_mut().insert("content-type", kind);
    response
}

fn error_response(status: StatusCode, message: &str) -> Response<Bytes> {
    json_response(status, &json!({"message": message}))
}
