//! GraphQL rules: which queries and mutations are allowed.
//!
//! Every operation of a document is checked, not only the one that the request names. Queries start
//! at `repository(owner, name)` of a registered repository and may select the fields that
//! [`SelectionScope`] lists. Fragments are checked at every place where they are spread.

use std::collections::BTreeSet;

use serde_json::{Map, Value};

use crate::verdict::Denial;

use super::body::read_object;
use super::document::{Document, Field, Kind, Literal, Operation, Selection};
use super::fields::SelectionScope;
use super::{GithubRequest, is_named, refuse, refuse_named};

/// The rule for queries.
const READ_RULE: &str = "graphql-read";
/// The rule for mutations.
const MUTATIONS_RULE: &str = "graphql-mutations";

/// Maximum number of checked selections; fragments count each time they are spread.
const MAX_STEPS: usize = 20_000;
/// Maximum nesting of selections, including fragments.
const MAX_DEPTH: usize = 48;

/// An allowed mutation.
struct Mutation {
    name: &'static str,
    /// The rule that it needs in addition to `graphql-mutations`.
    needs: Option<&'static str>,
    input: Input,
}

/// The requirements for a mutation's input.
#[derive(Clone, Copy)]
enum Input {
    /// No requirements.
    Any,
    /// Only these keys; `state` only with the rule `close`.
    Only(&'static [&'static str]),
    /// The event must be COMMENT unless the rule `review-verdicts` is enabled.
    Review,
}

const fn mutation(name: &'static str) -> Mutation {
    Mutation {
        name,
        needs: None,
        input: Input::Any,
    }
}

const fn mutation_with_rule(name: &'static str, rule: &'static str) -> Mutation {
    Mutation {
        needs: Some(rule),
        ..mutation(name)
    }
}

/// Every mutation that a rule can allow.
const MUTATIONS: &[Mutation] = &[
    Mutation {
        input: Input::Only(&[
            "clientMutationId",
            "repositoryId",
            "baseRefName",
            "headRefName",
            "headRepositoryId",
            "title",
            "body",
            "draft",
            "maintainerCanModify",
        ]),
        ..mutation("createPullRequest")
    },
    Mutation {
        input: Input::Only(&[
            "clientMutationId",
            "pullRequestId",
            "assigneeIds",
            "baseRefName",
            "body",
            "labelIds",
            "maintainerCanModify",
            "milestoneId",
            "title",
        ]),
        ..mutation("updatePullRequest")
    },
    Mutation {
        input: Input::Only(&[
            "clientMutationId",
            "repositoryId",
            "assigneeIds",
            "body",
            "issueTemplate",
            "labelIds",
            "milestoneId",
            "title",
        ]),
        ..mutation("createIssue")
    },
    Mutation {
        input: Input::Only(&[
            "clientMutationId",
            "id",
            "assigneeIds",
            "body",
            "labelIds",
            "milestoneId",
            "title",
        ]),
        ..mutation("updateIssue")
    },
    Mutation {
        input: Input::Review,
        ..mutation("addPullRequestReview")
    },
    Mutation {
        input: Input::Review,
        ..mutation("submitPullRequestReview")
    },
    mutation("addComment"),
    mutation("updateIssueComment"),
    mutation("addPullRequestReviewThread"),
    mutation("addPullRequestReviewThreadReply"),
    mutation("updatePullRequestReview"),
    mutation("updatePullRequestReviewComment"),
    mutation("requestReviews"),
    mutation("convertPullRequestToDraft"),
    mutation("markPullRequestReadyForReview"),
    mutation("addAssigneesToAssignable"),
    mutation("removeAssigneesFromAssignable"),
    mutation("addLabelsToLabelable"),
    mutation("removeLabelsFromLabelable"),
    mutation("createCheckRun"),
    mutation("updateCheckRun"),
    mutation_with_rule("closePullRequest", "close"),
    mutation_with_rule("reopenPullRequest", "close"),
    mutation_with_rule("closeIssue", "close"),
    mutation_with_rule("reopenIssue", "close"),
    mutation_with_rule("lockLockable", "lock"),
    mutation_with_rule("unlockLockable", "lock"),
    mutation_with_rule("addReaction", "reactions"),
    mutation_with_rule("removeReaction", "reactions"),
    mutation_with_rule("deleteIssueComment", "deletions"),
    mutation_with_rule("deletePullRequestReviewComment", "deletions"),
    mutation_with_rule("dismissPullRequestReview", "review-verdicts"),
    mutation_with_rule("mergePullRequest", "merge"),
    mutation_with_rule("enablePullRequestAutoMerge", "merge"),
    mutation_with_rule("disablePullRequestAutoMerge", "merge"),
    mutation_with_rule("enqueuePullRequest", "merge"),
    mutation_with_rule("dequeuePullRequest", "merge"),
    mutation_with_rule("mergeBranch", "merges"),
    mutation_with_rule("updatePullRequestBranch", "merges"),
    mutation_with_rule("createRef", "refs"),
    mutation_with_rule("updateRef", "refs"),
    mutation_with_rule("updateRefs", "refs"),
    mutation_with_rule("deleteRef", "refs"),
    mutation_with_rule("createCommitOnBranch", "contents"),
    mutation_with_rule("createBranchProtectionRule", "branch-protection"),
    mutation_with_rule("updateBranchProtectionRule", "branch-protection"),
    mutation_with_rule("deleteBranchProtectionRule", "branch-protection"),
    mutation_with_rule("updateRepository", "settings"),
    mutation_with_rule("archiveRepository", "settings"),
    mutation_with_rule("unarchiveRepository", "settings"),
];

/// Decides about a GraphQL request, and returns the rule that allows it.
pub(super) fn judge(
    request: &GithubRequest<'_>,
    is_enabled: impl Fn(&str) -> bool,
) -> Result<&'static str, Denial> {
    let body = read_object(READ_RULE, request)?;
    let mut text = None;
    let mut variables = None;
    for (key, value) in &body {
        match (key.as_str(), value) {
            ("query", Value::String(query)) => text = Some(query),
            ("variables", Value::Object(map)) => variables = Some(map),
            ("variables" | "operationName", Value::Null) | ("operationName", Value::String(_)) => {}
            _ => {
                return Err(refuse(
                    READ_RULE,
                    "A GraphQL body has a 'query' and may have an object of 'variables' and an \
                     'operationName'; persisted queries and extensions are not supported.",
                ));
            }
        }
    }
    let Some(text) = text else {
        return Err(refuse(
            READ_RULE,
            "The body has no 'query'. Persisted queries are not supported: send the document.",
        ));
    };
    let document = Document::parse(text).map_err(|why| {
        refuse(
            READ_RULE,
            format!("The GraphQL document is refused: {why}."),
        )
    })?;
    let empty = Map::new();
    let mut check = DocumentCheck {
        request,
        document: &document,
        variables: variables.unwrap_or(&empty),
        is_enabled: &is_enabled,
        open_fragments: Vec::new(),
        used_fragments: BTreeSet::new(),
        steps: 0,
    };
    let mut rule = READ_RULE;
    for operation in &document.operations {
        if operation.kind == Kind::Mutation {
            rule = MUTATIONS_RULE;
        }
        check.check_operation(operation)?;
    }
    if check.used_fragments.len() < document.fragments.len() {
        return Err(refuse(READ_RULE, "A fragment is never used. Remove it."));
    }
    Ok(rule)
}

/// The state of the check of one document.
struct DocumentCheck<'a, F> {
    request: &'a GithubRequest<'a>,
    document: &'a Document,
    variables: &'a Map<String, Value>,
    is_enabled: &'a F,
    /// The fragments around the current selection, to detect cycles.
    open_fragments: Vec<&'a str>,
    /// The fragments that were spread anywhere.
    used_fragments: BTreeSet<&'a str>,
    steps: usize,
}

/// The level of a selection: the top of an operation, or nested in a field.
#[derive(Clone, Copy)]
enum Level {
    Top(Kind),
    Nested(SelectionScope),
}

impl<'a, F: Fn(&str) -> bool> DocumentCheck<'a, F> {
    fn check_operation(&mut self, operation: &'a Operation) -> Result<(), Denial> {
        match operation.kind {
            Kind::Query => {}
            Kind::Mutation if (self.is_enabled)(MUTATIONS_RULE) => {}
            Kind::Mutation => {
                return Err(refuse(
                    MUTATIONS_RULE,
                    "GraphQL mutations are not allowed, because the repository cannot be \
                     determined from the ids in them. Use the REST endpoint under \
                     /repos/OWNER/NAME, or leave it to the operator, who can add \
                     'graphql-mutations' to egress.github.allow.",
                ));
            }
            Kind::Subscription => {
                return Err(refuse(
                    READ_RULE,
                    "GraphQL subscriptions are not supported.",
                ));
            }
        }
        self.check_selections(&operation.selections, Level::Top(operation.kind), 0)
    }

    fn check_selections(
        &mut self,
        selections: &'a [Selection],
        level: Level,
        depth: usize,
    ) -> Result<(), Denial> {
        if depth > MAX_DEPTH {
            return Err(refuse(
                READ_RULE,
                "The GraphQL document is nested too deeply.",
            ));
        }
        for selection in selections {
            self.steps += 1;
            if self.steps > MAX_STEPS {
                return Err(refuse(READ_RULE, "The GraphQL document is too large."));
            }
            match selection {
                Selection::Field(field) => {
                    if let Some(scope) = self.check_field(field, level)? {
                        self.check_selections(&field.selections, Level::Nested(scope), depth + 1)?;
                    }
                }
                Selection::Inline(inner) => self.check_selections(inner, level, depth + 1)?,
                Selection::Spread(name) => self.check_spread(name, level, depth)?,
            }
        }
        Ok(())
    }

    fn check_spread(&mut self, name: &'a str, level: Level, depth: usize) -> Result<(), Denial> {
        let Some(inner) = self.document.fragments.get(name) else {
            return Err(refuse(READ_RULE, "A fragment is used that is not defined."));
        };
        if self.open_fragments.contains(&name) {
            return Err(refuse(READ_RULE, "A fragment contains itself."));
        }
        self.used_fragments.insert(name);
        self.open_fragments.push(name);
        self.check_selections(inner, level, depth + 1)?;
        self.open_fragments.pop();
        Ok(())
    }

    /// Checks one field, and returns the scope of its selections.
    fn check_field(&self, field: &Field, level: Level) -> Result<Option<SelectionScope>, Denial> {
        match level {
            Level::Top(_) if field.name == "__typename" => Ok(None),
            Level::Top(Kind::Mutation) => self.check_mutation(field).map(Some),
            Level::Top(_) => self.check_root_field(field).map(Some),
            // A team has the field `organization` without arguments. The field of the same name of
            // a user has an argument, which can name any organisation.
            Level::Nested(SelectionScope::Identity)
                if field.name == "organization" && field.arguments.is_empty() =>
            {
                Ok(Some(SelectionScope::Identity))
            }
            Level::Nested(scope) => match scope.step(&field.name) {
                Some(scope) => Ok(Some(scope)),
                None => Err(refuse(
                    READ_RULE,
                    format!(
                        "The GraphQL field '{}' is not allowed here. Use the REST endpoint under \
                         /repos/OWNER/NAME.",
                        field.name
                    ),
                )),
            },
        }
    }

    fn check_root_field(&self, field: &Field) -> Result<SelectionScope, Denial> {
        match field.name.as_str() {
            "rateLimit" => Ok(SelectionScope::RateLimit),
            "__schema" | "__type" => Ok(SelectionScope::Schema),
            "viewer" if (self.is_enabled)("read-user") => Ok(SelectionScope::Viewer),
            "viewer" => Err(refuse_named("read-user", "The GraphQL field 'viewer'")),
            "repository" => self.check_repository(field),
            name => Err(refuse(
                READ_RULE,
                format!(
                    "The GraphQL field '{name}' is not allowed at the top level. Queries start at \
                     repository(owner, name) of a registered repository."
                ),
            )),
        }
    }

    fn check_repository(&self, field: &Field) -> Result<SelectionScope, Denial> {
        let (mut owner, mut name) = (None, None);
        for (key, value) in &field.arguments {
            match key.as_str() {
                "owner" => owner = self.string_value(value),
                "name" => name = self.string_value(value),
                "followRenames" => {}
                _ => {
                    return Err(refuse(
                        READ_RULE,
                        "The field 'repository' takes only an owner and a name.",
                    ));
                }
            }
        }
        let Some((owner, name)) = owner.zip(name) else {
            return Err(refuse(
                READ_RULE,
                "The owner and name of a repository must be plain strings, or variables with a \
                 value in the request.",
            ));
        };
        let mut repos = self.request.repos.iter();
        if repos.any(|repo| is_named(repo, owner, name)) {
            Ok(SelectionScope::Repository)
        } else {
            Err(refuse(
                "repository",
                "The query is about a repository the sandbox was not registered for. Ask the \
                 operator to register it.",
            ))
        }
    }

    fn check_mutation(&self, field: &Field) -> Result<SelectionScope, Denial> {
        let known = MUTATIONS.iter().find(|known| known.name == field.name);
        let Some(known) = known else {
            return Err(refuse(
                MUTATIONS_RULE,
                format!(
                    "The GraphQL mutation '{}' is not allowed. Leave it to the operator.",
                    field.name
                ),
            ));
        };
        if let Some(rule) = known.needs.filter(|rule| !(self.is_enabled)(rule)) {
            let what = format!("The GraphQL mutation '{}'", field.name);
            return Err(refuse_named(rule, &what));
        }
        let [(key, input)] = field.arguments.as_slice() else {
            return Err(refuse(
                MUTATIONS_RULE,
                "A mutation takes one argument, 'input'.",
            ));
        };
        if key != "input" {
            return Err(refuse(
                MUTATIONS_RULE,
                "A mutation takes one argument, 'input'.",
            ));
        }
        match known.input {
            Input::Any => {}
            Input::Only(keys) => self.check_keys(input, keys)?,
            Input::Review => self.check_review(input)?,
        }
        Ok(SelectionScope::MutationResult)
    }

    fn check_keys(&self, input: &Literal, known: &[&str]) -> Result<(), Denial> {
        for key in self.input_keys(input)? {
            match key {
                "state" if (self.is_enabled)("close") => {}
                "state" => return Err(refuse_named("close", "The field 'state'")),
                key if known.contains(&key) => {}
                _ => {
                    let known = known.join(", ");
                    return Err(refuse(
                        MUTATIONS_RULE,
                        format!("The input has an unknown field. Allowed fields: {known}."),
                    ));
                }
            }
        }
        Ok(())
    }

    /// Checks a review's event. A review without an event is pending, and is checked when it is
    /// submitted.
    fn check_review(&self, input: &Literal) -> Result<(), Denial> {
        if !self.input_keys(input)?.contains(&"event") {
            return Ok(());
        }
        let event = match input {
            Literal::Object(fields) => {
                let event = fields.iter().find(|(key, _)| key == "event");
                event.and_then(|(_, value)| match value {
                    Literal::Enum(value) => Some(value.as_str()),
                    value => self.string_value(value),
                })
            }
            Literal::Variable(name) => {
                let input = self.variables.get(name);
                input.and_then(|input| input.get("event")?.as_str())
            }
            Literal::Text(_) | Literal::Enum(_) | Literal::Other => None,
        };
        match event {
            Some("COMMENT") => Ok(()),
            Some("APPROVE" | "REQUEST_CHANGES") if (self.is_enabled)("review-verdicts") => Ok(()),
            _ => Err(refuse_named(
                "review-verdicts",
                "A review whose 'event' is not COMMENT",
            )),
        }
    }

    /// The keys of an input object, in the document or in the variables.
    fn input_keys<'s>(&'s self, input: &'s Literal) -> Result<Vec<&'s str>, Denial> {
        match input {
            Literal::Object(fields) => Ok(fields.iter().map(|(key, _)| key.as_str()).collect()),
            Literal::Variable(name) => match self.variables.get(name) {
                Some(Value::Object(fields)) => Ok(fields.keys().map(String::as_str).collect()),
                _ => Err(refuse(
                    MUTATIONS_RULE,
                    "A mutation's input must be an object, or a variable with an object as its value.",
                )),
            },
            Literal::Text(_) | Literal::Enum(_) | Literal::Other => Err(refuse(
                MUTATIONS_RULE,
                "A mutation's input must be an object.",
            )),
        }
    }

    /// The text of a literal, or of a variable's value in the request.
    fn string_value<'s>(&'s self, value: &'s Literal) -> Option<&'s str> {
        match value {
            Literal::Text(text) => Some(text),
            Literal::Variable(name) => self.variables.get(name)?.as_str(),
            Literal::Enum(_) | Literal::Object(_) | Literal::Other => None,
        }
    }
}
