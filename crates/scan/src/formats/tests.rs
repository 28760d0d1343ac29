use std::collections::BTreeMap;
use std::sync::LazyLock;

use super::*;

/// Pseudo-random letters and digits, so that an example has the entropy of a real secret. The
/// examples are assembled at run time, so that a secret scanner finds nothing in this file.
const NOISE: &str = "q7Rk2VbX9sLm4ZtYc1WdNf8HgJpA3uE5oTi6BxCvKnQyDzSrGhMw0jFePlUaIO7kXb2";
const HEX: &str = "9f3a1c7be05d2486fa13c9e07b5d8246ac1e9370bd5f8642e1a7c3095bd8f264";

fn noise(length: usize) -> String {
    NOISE.chars().cycle().take(length).collect()
}

fn upper(length: usize) -> String {
    let letters = "Q7RK2VBX4SLMZTYC3WDNF6HGJPA5UEOTI";
    letters
        .chars()
        .filter(|c| !"01".contains(*c))
        .cycle()
        .take(length)
        .collect()
}

fn hex(length: usize) -> String {
    HEX.chars().cycle().take(length).collect()
}

fn digits(length: usize) -> String {
    "7302918465".chars().cycle().take(length).collect()
}

/// For each rule, texts that contain a secret, and texts that only look similar.
fn examples() -> BTreeMap<&'static str, (Vec<String>, Vec<String>)> {
    let n = noise;
    let repeat_x = |length: usize| "x".repeat(length);
    let jwt = |payload: &str| {
        format!(
            "{}{}.{}{payload}.{}",
            "ey",
            "JhbGciOiJIUzI1NiJ9",
            "ey",
            n(43)
        )
    };
    let pem = |kind: &str| format!("-----{} {kind}PRIVATE KEY-----\nMIIE{}\n", "BEGIN", n(60));
    BTreeMap::from([
        (
            "aws-access-key-id",
            (
                vec![format!("{}{}", "AK", format!("IA{}", upper(16)))],
                vec![
                    format!("{}IOSFODNN7EXAMPLE", "AKIA"),
                    format!("x{}{}", "AKIA", upper(16)),
                    format!("{}{}", "AKIA", upper(20)),
                ],
            ),
        ),
        (
            "aws-secret-access-key",
            (
                vec![
                    format!("aws_secret_access_key = {}\n", n(40)),
                    format!("\"SecretAccessKey\": \"{}\"", n(40)),
                    format!("myAwsSecretAccessKey: '{}',", n(40)),
                    format!("AWS_SECRET_ACCESS_KEY={}", n(40)),
                ],
                vec![
                    format!("aws_secret_access_key = {}", n(41)),
                    format!("aws_secret_access_key = {}", repeat_x(40)),
                    "aws_secret_access_key = wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY".to_owned(),
                ],
            ),
        ),
        (
            "google-api-key",
            (
                vec![format!("key={}{}&x", "AIza", n(35))],
                vec![
                    format!("{}{}", "AIza", n(20)),
                    format!("{}{}", "AIza", n(50)),
                ],
            ),
        ),
        (
            "google-oauth-client-secret",
            (
                vec![format!("{}{}", "GOCSPX-", n(28))],
                vec![format!("{}{}", "GOCSPX-", n(5))],
            ),
        ),
        (
            "google-service-account",
            (
                vec![format!(
                    "{{\"type\": \"service_account\",\n \"project_id\": \"p\",\n \"private_key_id\": \"{}\"",
                    hex(40)
                )],
                vec!["{\"type\": \"service_account\", \"private_key_id\": \"…\"".to_owned()],
            ),
        ),
        (
            "azure-storage-key",
            (
                vec![
                    format!("AccountName=a;{}={}==;EndpointSuffix=", "AccountKey", n(86)),
                    format!("SharedAccessKeyName=Root;{}={}=", "SharedAccessKey", n(43)),
                ],
                vec!["AccountName=a;AccountKey=<key>".to_owned()],
            ),
        ),
        (
            "digitalocean-token",
            (
                vec![format!("{}{}", "dop_v1_", hex(64))],
                vec![format!("{}{}", "dop_v1_", hex(63))],
            ),
        ),
        (
            "github-token",
            (
                vec![
                    format!("{}{}", "ghp_", n(36)),
                    format!("token={}{}", "gho_", n(36)),
                    format!("https://x-access-token:{}{}@github.com/", "ghs_", n(36)),
                    format!("{{\"run\": \"first\\n{}{}\"}}", "ghp_", n(36)),
                ],
                vec![
                    format!("{}{}", "ghp_", repeat_x(36)),
                    format!("{}{}", "ghp_", n(20)),
                    format!("a{}{}", "ghp_", n(36)),
                ],
            ),
        ),
        (
            "github-fine-grained-token",
            (
                vec![format!("{}{}_{}", "github_pat_", n(22), n(59))],
                vec![format!("{}{}", "github_pat_", n(22))],
            ),
        ),
        (
            "gitlab-token",
            (
                vec![
                    format!("{}{}", "glpat-", n(20)),
                    format!("{}{}", "glrt-", n(20)),
                ],
                vec![format!("{}{}", "glpat-", n(8))],
            ),
        ),
        (
            "atlassian-token",
            (
                vec![format!("{}{}=ABCDEF12", "ATATT3", n(180))],
                vec![format!("{}{}", "ATATT3", n(40))],
            ),
        ),
        (
            "npm-token",
            (
                vec![format!("_authToken={}{}", "npm_", n(36))],
                vec![
                    "npm_config_registry=x".to_owned(),
                    format!("{}{}", "npm_", n(40)),
                ],
            ),
        ),
        (
            "pypi-token",
            (
                vec![format!("{}IcHlwaS5vcmc{}", "pypi-AgE", n(120))],
                vec!["pypi-AgE".to_owned()],
            ),
        ),
        (
            "crates-io-token",
            (
                vec![format!("token = \"{}{}\"", "cio", n(32))],
                vec![format!("servi{}{}", "cio", n(32)), "cio".to_owned()],
            ),
        ),
        (
            "rubygems-token",
            (
                vec![format!("{}{}", "rubygems_", hex(48))],
                vec!["rubygems_version".to_owned()],
            ),
        ),
        (
            "docker-hub-token",
            (
                vec![format!("{}{}", "dckr_pat_", n(27))],
                vec![format!("{}{}", "dckr_pat_", n(12))],
            ),
        ),
        (
            "openai-key",
            (
                vec![
                    format!("{}proj-{}", "sk-", n(120)),
                    format!("{}{}T3BlbkFJ{}", "sk-", n(20), n(20)),
                ],
                vec![
                    format!("ta{}{}", "sk-", n(48)),
                    format!("{}{}", "sk-", repeat_x(48)),
                    "sk-button sk-proj-name".to_owned(),
                ],
            ),
        ),
        (
            "anthropic-key",
            (
                vec![format!("{}ant-api03-{}", "sk-", n(95))],
                vec![format!("{}ant-api03-…", "sk-")],
            ),
        ),
        (
            "huggingface-token",
            (
                vec![format!("{}{}", "hf_", n(34))],
                vec!["hf_hub_download".to_owned()],
            ),
        ),
        (
            "slack-token",
            (
                vec![
                    format!("{}b-{}-{}-{}", "xox", digits(12), digits(12), n(24)),
                    format!("{}-1-A{}-{}-{}", "xapp", upper(10), digits(13), hex(64)),
                ],
                vec![format!("{}b-your-token-here", "xox")],
            ),
        ),
        (
            "slack-webhook",
            (
                vec![format!(
                    "https://{}/services/T{}/B{}/{}",
                    "hooks.slack.com",
                    upper(8),
                    upper(8),
                    n(24)
                )],
                vec!["https://hooks.slack.com/services/T…/B…/…".to_owned()],
            ),
        ),
        (
            "discord-token",
            (
                vec![format!("DISCORD_TOKEN={}{}.{}.{}", "M", n(25), n(6), n(38))],
                vec!["discord.gateway.connect.example".to_owned()],
            ),
        ),
        (
            "discord-webhook",
            (
                vec![format!(
                    "https://{}/api/webhooks/{}/{}",
                    "discord.com",
                    digits(18),
                    n(68)
                )],
                vec!["https://discord.com/api/webhooks/{id}/{token}".to_owned()],
            ),
        ),
        (
            "telegram-token",
            (
                vec![format!(
                    "bot{}{}",
                    "",
                    format!("/{}:AA{}/", digits(10), n(33))
                )],
                vec![format!("{}:AA{}", digits(3), n(33)), "::AA".to_owned()],
            ),
        ),
        (
            "sendgrid-key",
            (
                vec![format!("{}{}.{}", "SG.", n(22), n(43))],
                vec!["MSG.send SG.x".to_owned()],
            ),
        ),
        (
            "twilio-key",
            (
                vec![
                    format!("TWILIO_AUTH_TOKEN={}", hex(32)),
                    format!("twilio.key: \"SK{}\"", hex(32)),
                ],
                vec!["twilio = require('twilio')".to_owned()],
            ),
        ),
        (
            "stripe-key",
            (
                vec![
                    format!("{}_{}", "sk_live", n(24)),
                    format!("{}_{}", "rk_live", n(99)),
                ],
                vec![
                    format!("{}_{}", "sk_test", n(24)),
                    format!("{}_…", "sk_live"),
                ],
            ),
        ),
        (
            "stripe-webhook-secret",
            (
                vec![format!("{}{}", "whsec_", n(32))],
                vec!["whsec_test".to_owned()],
            ),
        ),
        (
            "shopify-token",
            (
                vec![format!("{}{}", "shpat_", hex(32))],
                vec![format!("{}{}", "shpat_", hex(12))],
            ),
        ),
        (
            "vault-token",
            (
                vec![format!("{}{}", "hvs.", n(95))],
                vec!["hvs.Token".to_owned()],
            ),
        ),
        (
            "grafana-token",
            (
                vec![format!("{}{}_{}", "glsa_", n(32), hex(8))],
                vec![format!("{}{}", "glsa_", n(32))],
            ),
        ),
        (
            "private-key",
            (
                vec![
                    pem(""),
                    pem("RSA "),
                    pem("EC "),
                    pem("OPENSSH "),
                    pem("ENCRYPTED "),
                    format!(
                        "-----{} PGP PRIVATE KEY BLOCK-----\nVersion: 1\n\n{}\n",
                        "BEGIN",
                        n(64)
                    ),
                    format!("\"-----{} PRIVATE KEY-----\\nMIIE{}\\n\"", "BEGIN", n(60)),
                    format!(
                        "-----{} RSA PRIVATE KEY-----\nProc-Type: 4,ENCRYPTED\nDEK-Info: AES-128-CBC,{}\n\n{}",
                        "BEGIN",
                        hex(32),
                        n(64)
                    ),
                ],
                vec![
                    format!("-----{} PUBLIC KEY-----\nMIIB{}", "BEGIN", n(60)),
                    format!("-----{} CERTIFICATE-----\nMIIB{}", "BEGIN", n(60)),
                    format!(
                        "-----{} PRIVATE KEY-----\n…\n-----END PRIVATE KEY-----",
                        "BEGIN"
                    ),
                ],
            ),
        ),
        (
            "putty-private-key",
            (
                vec![format!(
                    "{}-3: ssh-ed25519\nEncryption: none\nComment: c\nPublic-Lines: 2\n{}\nPrivate-Lines: 1\n",
                    "PuTTY-User-Key-File",
                    n(60)
                )],
                vec!["PuTTY-User-Key-File-2: is how it begins".to_owned()],
            ),
        ),
        (
            "age-secret-key",
            (
                vec![format!(
                    "{}-1{}",
                    "AGE-SECRET-KEY", "QPZRY9X8GF2TVDW0S3JN54KHCE6MUA7LQPZRY9X8GF2TVDW0S3JN54KHCE"
                )],
                vec!["AGE-SECRET-KEY-1…".to_owned()],
            ),
        ),
        (
            "jwt",
            (
                vec![
                    jwt(&format!("J1c2VyIjoi{}", n(20))),
                    jwt(&format!("J{}", n(3000))),
                ],
                vec![
                    jwt("JzdWIiOiIxMjM0NTY3ODkwIiwibmFtZSI6IkpvaG4gRG9lIiwiaWF0IjoxNTE2MjM5MDIyfQ"),
                    format!("{}JhbGciOiJub25lIn0.{}J1c2VyIjoiYSJ9.", "ey", "ey"),
                ],
            ),
        ),
        (
            "password-in-url",
            (
                vec![
                    format!("postgres://app:{}@db.internal:5432/app", n(12)),
                    format!("url = \"mongodb+srv://u:{}@cluster\"", n(10)),
                    format!("redis://:{}@cache:6379", n(20)),
                    format!("first\\npostgres+psycopg://app:{}@db/app", n(12)),
                    format!("https://user:{}@example.com/x.git", n(14)),
                ],
                vec![
                    "postgres://postgres:postgres@localhost/x".to_owned(),
                    "postgres://app:${DB_PASSWORD}@db/x".to_owned(),
                    "https://example.com:8080/a@b".to_owned(),
                    "mysql://user:mypassword123@db/x".to_owned(),
                    "https://example.com/path".to_owned(),
                ],
            ),
        ),
    ])
}

static BUILT_IN: LazyLock<FormatDetector> = LazyLock::new(|| FormatDetector::built_in().unwrap());

fn found(text: &[u8]) -> Vec<&'static str> {
    let mut names = Vec::new();
    BUILT_IN.scan(text, &mut |finding| names.push(finding.rule));
    names
}

#[test]
fn every_rule_finds_its_examples_and_no_lookalikes() {
    let mut examples = examples();
    for rule in table::FORMAT_RULES {
        let (matching, lookalikes) = examples.remove(rule.id).unwrap_or_default();
        assert!(
            !matching.is_empty() && !lookalikes.is_empty(),
            "{} has no examples",
            rule.id
        );
        for text in matching {
            for text in [text.clone(), format!("before \n\"{text}\" after")] {
                let names = found(text.as_bytes());
                let times = names.iter().filter(|name| **name == rule.id).count();
                assert_eq!(times, 1, "{}: {text}: {names:?}", rule.id);
            }
        }
        for text in lookalikes {
            let names = found(text.as_bytes());
            assert!(!names.contains(&rule.id), "{}: {text}", rule.id);
        }
    }
    assert_eq!(examples.keys().count(), 0, "examples without a rule");
}

#[test]
fn names_are_unique_and_no_keyword_begins_another() {
    let detector = FormatDetector::built_in().unwrap();
    let mut names: Vec<_> = detector.rules().map(|(id, _)| id).collect();
    let count = names.len();
    names.sort_unstable();
    names.dedup();
    assert_eq!(names.len(), count);
    // The search reports one keyword per position.
    let keywords: Vec<_> = table::FORMAT_RULES
        .iter()
        .flat_map(|rule| rule.keywords)
        .collect();
    for keyword in &keywords {
        for other in &keywords {
            assert!(
                keyword == other || !other.starts_with(**keyword),
                "{keyword} begins {other}"
            );
        }
    }
}

#[test]
fn finding_is_the_span_of_the_secret() {
    let token = format!("{}{}", "ghp_", noise(36));
    let text = format!("first line\nTOKEN={token}\n");
    let detector = FormatDetector::built_in().unwrap();
    let mut spans = Vec::new();
    detector.scan(text.as_bytes(), &mut |finding| spans.push(finding.span));
    assert_eq!(spans.pop(), Some(17..17 + token.len() as u64));
    assert!(spans.is_empty());
}

#[test]
fn placeholder_is_not_a_secret() {
    let random = noise(24);
    for text in [
        format!("GITHUB_TOKEN=PALISADE_github_{random}"),
        format!("postgres://app:PALISADE_db_{random}@db.internal/app"),
        format!("{}proj-PALISADE_openai_{random}{random}", "sk-"),
        format!("aws_secret_access_key = PALISADE_aws_{}", noise(26)),
    ] {
        assert_eq!(found(text.as_bytes()), [""; 0], "{text}");
    }
}

#[test]
fn keyword_inside_another_keyword_is_still_found() {
    let key = format!("glpat-----{} PRIVATE KEY-----\n{}", "BEGIN", noise(64));
    assert_eq!(found(key.as_bytes()), ["private-key"]);
    let token = format!("xoxx{}{}", "-ghp_", noise(36));
    assert_eq!(found(token.as_bytes()), ["github-token"]);
}

#[test]
fn secret_among_non_utf8_bytes_is_found() {
    let mut bytes = vec![0xff, 0x00, 0xfe];
    bytes.extend(format!("{}{}", "ghp_", noise(36)).bytes());
    bytes.extend([0x80, 0x00]);
    assert_eq!(found(&bytes), ["github-token"]);
}

/// Text similar to source code: words that look like the start of a secret.
fn clean_text() -> Vec<u8> {
    let line = "let task-desk = \"https://example.com/\"; // SG. eyJ cio npm_config hf_hub :AA disk-sk-x\n";
    line.repeat(2000).into_bytes()
}

#[test]
fn clean_input_allocates_no_memory() {
    let detector = FormatDetector::built_in().unwrap();
    let text = clean_text();
    let mut stream = crate::stream::StreamScanner::new(&detector);
    let mut count = 0;
    let mut scan_all = || {
        detector.scan(&text, &mut |_| count += 1);
        for piece in text.chunks(1000) {
            stream.feed(piece, &mut |_| count += 1);
        }
        stream.finish(&mut |_| count += 1);
    };
    // The caches of a regular expression are allocated once.
    scan_all();
    let used = allocation_counter::measure(&mut scan_all);
    assert_eq!((used.count_total, count), (0, 0));
}

/// Each of these texts is a keyword, or the start of a match, at every position.
#[test]
fn hostile_input_is_scanned_in_linear_time() {
    let detector = FormatDetector::built_in().unwrap();
    for unit in [
        "sk-",
        "eyJ.",
        "://",
        "-----BEGIN ",
        "https://a:",
        ":AA",
        "-eyJaaaaaaaaaa",
        "eyJaaaaaaaaaaa.eyJaaaaaaaaaaa.",
        "twilio",
        "\"service_account\"",
    ] {
        let text = unit.repeat(30_000 / unit.len());
        let longer = unit.repeat(120_000 / unit.len());
        // The best of several runs, because other processes use the CPU too.
        let time = |text: &str| {
            let tries = (0..5).map(|_| {
                let started = std::time::Instant::now();
                detector.scan(text.as_bytes(), &mut |_| {});
                started.elapsed()
            });
            tries.min().unwrap()
        };
        let (short, long) = (time(&text), time(&longer));
        // Four times as much input; quadratic time would be sixteen times as long.
        assert!(
            long < short * 12 + std::time::Duration::from_millis(50),
            "{unit}: {short:?} {long:?}"
        );
    }
}
