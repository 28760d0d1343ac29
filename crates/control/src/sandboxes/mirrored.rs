//! What git inside a sandbox is told of mirrors.

use config::section::git::Mirror;

/// Variables by which git asks the gate where it would ask an upstream that is mirrored
/// (git-config(1), `GIT_CONFIG_COUNT`, since git 2.31).
pub(super) fn environment(mirrors: &[Mirror]) -> Vec<(String, String)> {
    let pairs = mirrors.iter().flat_map(|mirror| {
        let key = format!("url.http://palisade.internal/git/{}.insteadOf", mirror.name);
        let spellings = mirror.spellings().into_iter();
        spellings.map(move |spelling| (key.clone(), spelling))
    });
    let mut variables = Vec::new();
    let mut count = 0;
    for (key, value) in pairs {
        variables.push((format!("GIT_CONFIG_KEY_{count}"), key));
        variables.push((format!("GIT_CONFIG_VALUE_{count}"), value));
        count += 1;
    }
    if count > 0 {
        variables.push(("GIT_CONFIG_COUNT".to_owned(), count.to_string()));
    }
    variables
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use super::*;

    fn mirror(name: &str, upstream: &str) -> Mirror {
        Mirror {
            name: name.to_owned(),
            upstream: upstream.to_owned(),
            identity: None,
            host_key: None,
        }
    }

    #[test]
    fn git_asks_the_gate_where_it_would_ask_upstream() {
        let variables = environment(&[
            mirror("app", "ssh://git@git.example/acme/app.git"),
            mirror("application", "git@git.example:acme/app-lication"),
            mirror("odd", "ssh://git.example:2222/odd.git"),
            mirror("web", "https://web.example/acme/web"),
        ]);
        for (asked, expected) in [
            ("ssh://git@git.example/acme/app.git", "app"),
            ("ssh://git@git.example/acme/app", "app"),
            ("ssh://git.example:22/acme/app.git", "app.git"),
            ("git@git.example:acme/app.git", "app.git"),
            ("git.example:acme/app", "app"),
            ("git@git.example:acme/app-lication", "application"),
            ("ssh://git.example/acme/app-lication.git", "application.git"),
            ("ssh://git.example:2222/odd.git", "odd"),
            ("https://web.example/acme/web.git", "web.git"),
        ] {
            let asking = Command::new("git")
                .args(["ls-remote", "--get-url", asked])
                .current_dir("/")
                .envs(variables.clone())
                .output();
            let heard = String::from_utf8(asking.unwrap().stdout).unwrap();
            let url = format!("http://palisade.internal/git/{expected}");
            assert_eq!(heard.trim(), url, "{asked}");
        }
        assert_eq!(environment(&[]), []);
    }
}
