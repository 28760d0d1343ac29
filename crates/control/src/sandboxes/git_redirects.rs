//! Git configuration of a sandbox that redirects mirrored upstreams to the gate, and ssh URLs
//! of git hosts to HTTPS.

use std::collections::BTreeSet;

use config::section::git::{GitSection, MirrorSettings};
use policy::host::Host;
use sandbox::git::remote_url::RemoteUrl;

use super::repository::git_host;

/// Environment variables that make git use the gate for a mirrored upstream, and HTTPS for ssh
/// URLs of a host of `git.hosts` (git-config(1), `GIT_CONFIG_COUNT`, since git 2.31). Git
/// applies the longest matching `insteadOf`, so a mirror has precedence over its host.
pub(super) fn environment(git: &GitSection, remotes: &[(String, String)]) -> Vec<(String, String)> {
    let mirrors = git.mirrors.iter().flat_map(mirror_rules);
    let hosts = git.hosts.iter().flat_map(|host| {
        let key = format!("url.https://{host}/.insteadOf");
        let prefixes = ssh_prefixes(host, &git.hosts, remotes).into_iter();
        prefixes.map(move |prefix| (key.clone(), prefix))
    });
    let mut variables = Vec::new();
    let mut count = 0;
    for (key, value) in mirrors.chain(hosts) {
        variables.push((format!("GIT_CONFIG_KEY_{count}"), key));
        variables.push((format!("GIT_CONFIG_VALUE_{count}"), value));
        count += 1;
    }
    if count > 0 {
        variables.push(("GIT_CONFIG_COUNT".to_owned(), count.to_string()));
    }
    variables
}

fn mirror_rules(mirror: &MirrorSettings) -> impl Iterator<Item = (String, String)> {
    let key = format!("url.http://palisade.internal/git/{}.insteadOf", mirror.name);
    let spellings = mirror.equivalent_urls().into_iter();
    spellings.map(move |spelling| (key.clone(), spelling))
}

/// Prefixes of ssh URLs of `host`: for the user `git`, for no user, and for the users, ports
/// and spellings of the host in the operator's remotes. The HTTPS port is 443, whatever the ssh
/// port is.
fn ssh_prefixes(host: &Host, hosts: &[Host], remotes: &[(String, String)]) -> BTreeSet<String> {
    let mut users = BTreeSet::from(["git@".to_owned(), String::new()]);
    let mut names = BTreeSet::from([host.to_string()]);
    let mut addresses = BTreeSet::from([host.to_string(), format!("{host}:22")]);
    // Passwords, and characters that are invalid in a URL, are not passed on.
    let plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.' | ':');
    for (_, url) in remotes {
        let Some(url) = RemoteUrl::parse(url) else {
            continue;
        };
        if !url.is_ssh() || git_host(&url, hosts) != Some(host) || !url.address.chars().all(plain) {
            continue;
        }
        let user = url.user.filter(|user| !user.contains(':'));
        users.extend(
            user.filter(|user| user.chars().all(plain))
                .map(|user| format!("{user}@")),
        );
        names.insert(url.host().to_owned());
        addresses.insert(url.address.to_owned());
    }
    let mut prefixes = BTreeSet::new();
    for user in &users {
        for address in &addresses {
            prefixes.insert(format!("ssh://{user}{address}/"));
        }
        for name in &names {
            prefixes.insert(format!("{user}{name}:"));
            prefixes.insert(format!("{user}{name}:/"));
        }
    }
    prefixes
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use super::*;

    fn mirror(name: &str, upstream: &str) -> MirrorSettings {
        MirrorSettings {
            name: name.to_owned(),
            upstream: upstream.to_owned(),
            identity: None,
            host_key: None,
        }
    }

    #[test]
    fn mirrored_urls_are_redirected_to_the_gate() {
        let mirrors = vec![
            mirror("app", "ssh://git@git.example/acme/app.git"),
            mirror("application", "git@git.example:acme/app-lication"),
            mirror("odd", "ssh://git.example:2222/odd.git"),
            mirror("web", "https://web.example/acme/web"),
        ];
        // A mirror has precedence over its host.
        let git = git(mirrors, &["git.example"]);
        let variables = environment(&git, &[]);
        for (url, expected) in [
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
            let gate = format!("http://palisade.internal/git/{expected}");
            assert_eq!(effective_url(&variables, url), gate, "{url}");
        }
    }

    #[test]
    fn ssh_urls_of_git_hosts_become_https() {
        // Issue 14, number 15.
        let git = git(Vec::new(), &["github.com", "forge.example"]);
        let remotes = [
            ("origin", "ssh://deploy@forge.example:2222/o/r"),
            ("other", "GitHub.com:o/r"),
            ("secret", "ssh://me:hunter2@forge.example/o/r"),
        ];
        let remotes = remotes.map(|(name, url)| (name.to_owned(), url.to_owned()));
        let variables = environment(&git, &remotes);
        for (url, expected) in [
            ("git@github.com:o/r", "https://github.com/o/r"),
            ("git@github.com:/o/r.git", "https://github.com/o/r.git"),
            ("github.com:o/r", "https://github.com/o/r"),
            ("GitHub.com:o/r", "https://github.com/o/r"),
            ("ssh://git@github.com/o/r", "https://github.com/o/r"),
            ("ssh://git@github.com:22/o/r", "https://github.com/o/r"),
            ("ssh://github.com/o/r", "https://github.com/o/r"),
            ("deploy@forge.example:o/r", "https://forge.example/o/r"),
            (
                "ssh://deploy@forge.example:2222/o/r",
                "https://forge.example/o/r",
            ),
            ("ssh://forge.example:2222/o/r", "https://forge.example/o/r"),
            // Other URLs are unchanged.
            (
                "git@github.com.evil.example:o/r",
                "git@github.com.evil.example:o/r",
            ),
            ("ssh://git@git.example/o/r", "ssh://git@git.example/o/r"),
            ("https://github.com/o/r", "https://github.com/o/r"),
        ] {
            assert_eq!(effective_url(&variables, url), expected, "{url}");
        }
        assert!(!format!("{variables:?}").contains("hunter2"));
        assert_eq!(environment(&self::git(Vec::new(), &[]), &[]), []);
    }

    fn git(mirrors: Vec<MirrorSettings>, hosts: &[&str]) -> GitSection {
        GitSection {
            mirrors,
            hosts: hosts
                .iter()
                .map(|host| Host::parse(host).unwrap())
                .collect(),
            ..GitSection::default()
        }
    }

    /// The URL that git uses for `url` with these variables.
    fn effective_url(variables: &[(String, String)], url: &str) -> String {
        let output = Command::new("git")
            .args(["ls-remote", "--get-url", url])
            .current_dir("/")
            .envs(variables.to_vec())
            .output();
        let stdout = String::from_utf8(output.unwrap().stdout).unwrap();
        stdout.trim().to_owned()
    }
}
