//! The sandbox that `run` works in: the one of that name, or a new one.

use std::time::Duration;

use anyhow::Result;
use control::client::{Client, ClientError};
use sandbox::name::Slug;
use serde_json::{Value, json};
use tokio::time::{Instant, sleep};

use crate::cli::enter::{RunArgs, name_after};
use crate::cli::sandbox_lookup::{self, Here, Place};
use crate::cli::sandboxes::{Making, below, make, route};
use crate::cli::{ports, repo_limit};
use crate::exit::{Exit, Failure, exit_of};
use crate::output::{self, Spinner};

/// How long another command may take to make the sandbox that both want.
const PATIENCE: Duration = Duration::from_secs(60);

/// Between two looks at whether it is there.
const STEP: Duration = Duration::from_millis(100);

/// The sandbox to run in, and whether it is new.
pub async fn make_or_reuse(
    gate: &Client,
    args: &RunArgs,
    for_script: bool,
) -> Result<(Place, bool)> {
    let Some(name) = &args.name else {
        let name = name_after(&args.command)?;
        return Ok((make_anew(gate, &args.making, name, for_script).await?, true));
    };
    let slug =
        Slug::from_name(name).map_err(|error| Failure::new(Exit::Usage, error.to_string()))?;
    let here = Here::find().filter(|_| !args.making.no_repo);
    let until = Instant::now() + PATIENCE;
    let mut waits = false;
    loop {
        if let Some(place) = sandbox_lookup::in_repository(gate, &slug, here.as_ref()).await? {
            return Ok((reuse(gate, place, &args.making).await?, false));
        }
        match make_anew(gate, &args.making, name.clone(), for_script).await {
            // Another command makes it at this moment, and what it makes is as good.
            Err(error) if is_taken(&error) => {
                if !waits && !for_script && Spinner::is_seen() {
                    output::say(&format!(
                        "palisade: another command is making sandbox {slug}; waiting for it"
                    ));
                }
                waits = true;
            }
            made => return Ok((made?, true)),
        }
        if Instant::now() > until {
            let message = format!(
                "another command has been making sandbox '{slug}' for {} s; run this again when \
                 it is done, or use another name",
                PATIENCE.as_secs()
            );
            return Err(Failure::new(Exit::Exists, message).into());
        }
        sleep(STEP).await;
    }
}

async fn make_anew(
    gate: &Client,
    making: &Making,
    name: String,
    for_script: bool,
) -> Result<Place> {
    let place = make(gate, making, name, for_script).await?;
    let branch = place.branch_name.as_ref();
    output::say(&format!(
        "palisade: sandbox {}{}",
        place.name,
        branch.map_or_else(String::new, |branch| format!(", branch {branch}"))
    ));
    Ok(place)
}

fn is_taken(error: &anyhow::Error) -> bool {
    matches!(
        error.downcast_ref::<ClientError>(),
        Some(ClientError::Refused { code, .. }) if code == "exists"
    )
}

/// Makes a sandbox that is there fit for what is asked, or says why it is not.
async fn reuse(gate: &Client, place: Place, making: &Making) -> Result<Place> {
    let registered = if making.repos.is_empty() && making.auth_mode.is_none() {
        Value::Null
    } else {
        gate.get(&format!("/v1/registrations/{}", place.id)).await?
    };
    let differences = differences(&place, making, &registered);
    if !differences.is_empty() {
        let name = &place.name;
        let message = format!(
            "sandbox '{name}' is there already, and is not what is asked for:\n  {}\nrun without \
             these to use it, or create it again after: palisade delete {name}",
            differences.join("\n  ")
        );
        return Err(Failure::new(Exit::Exists, message).into());
    }
    wake(gate, &place).await?;
    let now: Place = serde_json::from_value(gate.get(&route(&place)).await?)?;
    for note in &now.notes {
        output::say(&format!("palisade: {}", output::safe(note)));
    }
    for wanted in &making.publish {
        if !place.published.contains(wanted) {
            ports::publish(gate, &place, *wanted).await?;
        }
    }
    Ok(place)
}

/// What was decided when the sandbox was made, and was decided otherwise.
fn differences(place: &Place, making: &Making, registered: &Value) -> Vec<String> {
    let mut all = Vec::new();
    if making.dirty {
        all.push("--dirty: its workspace was filled when it was made".to_owned());
    }
    if making.depth.is_some() {
        all.push("--depth: its history came along when it was made".to_owned());
    }
    if making.setup_command.is_some() {
        all.push("--setup-command: it runs only when a sandbox is made".to_owned());
    }
    for (flag, wanted, is) in [
        ("--root", making.root, place.root),
        ("--nested", making.nested, place.nested),
    ] {
        if wanted && !is {
            all.push(format!("{flag}: it was made without"));
        }
    }
    if let Some(backend) = &making.backend
        && *backend != place.backend
    {
        all.push(format!("--backend {backend}: it is in {}", place.backend));
    }
    let text = |value: &Value| output::safe(value.as_str().unwrap_or_default());
    if !making.repos.is_empty() {
        let repos = registered.get("repos").and_then(Value::as_array);
        let registered = repos.into_iter().flatten();
        let registered = registered.filter_map(|repo| serde_json::from_value(repo.clone()).ok());
        let mut has: Vec<String> = registered.map(|repo| repo_limit::show(&repo)).collect();
        let mut wanted: Vec<String> = making.repos.iter().map(repo_limit::show).collect();
        for list in [&mut has, &mut wanted] {
            list.sort();
            list.dedup();
        }
        if has != wanted {
            let has = if has.is_empty() {
                "no repository".to_owned()
            } else {
                has.join(", ")
            };
            all.push(format!(
                "--repo {}: it may speak to {has}",
                wanted.join(", ")
            ));
        }
    }
    if let Some(mode) = &making.auth_mode {
        let has = registered.get("auth_mode").map(text).unwrap_or_default();
        if has != *mode {
            all.push(format!("--auth-mode {mode}: it is {has}"));
        }
    }
    all
}

/// Resumes a sandbox that is paused, and starts one whose processes have ended.
async fn wake(gate: &Client, place: &Place) -> Result<()> {
    if place.status == "active" {
        return Ok(());
    }
    let woken = gate.post(&below(place, "resume"), &json!({})).await;
    let name = &place.name;
    let why = output::safe(place.reason.as_deref().unwrap_or(&place.status));
    match woken {
        Ok(_) if place.status == "paused" => Ok(()),
        Ok(_) => {
            output::say(&format!(
                "palisade: sandbox {name} was started again: {why}"
            ));
            Ok(())
        }
        Err(error) => {
            let error = anyhow::Error::from(error);
            let exit = match exit_of(&error) {
                // It is there: in its list it has a name and a reason.
                Exit::NotFound => Exit::Exists,
                other => other,
            };
            let message = format!(
                "sandbox '{name}' cannot be used: {why} ({error:#}); to remove it: palisade delete \
                 {name}"
            );
            Err(Failure::new(exit, message).into())
        }
    }
}
