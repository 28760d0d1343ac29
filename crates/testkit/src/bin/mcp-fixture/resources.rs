//! Resources.

use serde_json::{Value, json};

use crate::content::PNG;
use crate::server::text;
use crate::wire::Outcome;

/// A resource's content.
pub(crate) fn read(params: &Value) -> Outcome {
    let uri = text(params, "uri");
    let content = match uri {
        "test://static-text" => {
            let text = "This is the content of the static text resource.";
            json!({"uri": uri, "mimeType": "text/plain", "text": text})
        }
        "test://static-binary" => json!({"uri": uri, "mimeType": "image/png", "blob": PNG}),
        "test://watched-resource" => {
            json!({"uri": uri, "mimeType": "text/plain", "text": "Watched."})
        }
        _ => {
            let id = uri.strip_prefix("test://template/");
            let Some(id) = id.and_then(|rest| rest.strip_suffix("/data")) else {
                // The revisions up to 2025-11-25 require this error (server/resources, error
                // handling).
                let data = json!({"uri": uri});
                return Outcome::Error(-32002, "Resource not found".to_owned(), Some(data));
            };
            let data =
                json!({"id": id, "templateTest": true, "data": format!("Data for ID: {id}")});
            json!({"uri": uri, "mimeType": "application/json", "text": data.to_string()})
        }
    };
    Outcome::value(&json!({"contents": [content]}))
}
