//! The credentials that a new sandbox or container gets.

use config::Settings;
use credentials::service::CredentialService;
use credentials::table::CredentialTable;

use crate::reply::ControlError;

/// The rows that a new sandbox gets: the named ones, or those of `credentials.default` that have a
/// value.
pub(crate) fn initial_grants(
    settings: &Settings,
    service: &CredentialService,
    named: Option<Vec<String>>,
) -> Result<Vec<String>, ControlError> {
    let table = CredentialTable::new(&settings.credentials);
    if let Some(named) = named {
        check_names(&table, &named)?;
        return Ok(named);
    }
    let has_value = |name: &&String| {
        let row = table.row(name);
        row.is_some_and(|row| service.values().is_configured(row))
    };
    let defaults = settings.credentials.default.iter();
    Ok(defaults.filter(has_value).cloned().collect())
}

/// Refuses names that are not in the table.
pub(crate) fn check_names(table: &CredentialTable, names: &[String]) -> Result<(), ControlError> {
    let unknown = names.iter().find(|name| table.row(name).is_none());
    unknown.map_or(Ok(()), |name| Err(unknown_row(table, name)))
}

/// The error about a name that is not in the table.
pub(crate) fn unknown_row(table: &CredentialTable, name: &str) -> ControlError {
    let known: Vec<&str> = table.rows().iter().map(|row| row.name.as_str()).collect();
    ControlError::Bad(format!(
        "There is no credential '{}'; credentials are {}",
        name.escape_default(),
        known.join(", ")
    ))
}
