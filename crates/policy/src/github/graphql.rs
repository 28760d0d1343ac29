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

const READ: &str = "graphql-read";
const MUTATE: &str = "graphql-mutations";

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
    /// None.
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

const fn mutation_of(name: &'static str, rule: &'static str) -> Mutation {
    Mutation {
        needs: Some(rule),
        ..mutation(name)
    }
}

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
    mutation_of("closePullRequest", "close"),
    mutation_of("reopenPullRequest", "close"),
    mutation_of("closeIssue", "close"),
    mutation_of("reopenIssue", "close"),
    mutation_of("lockLockable", "lock"),
    mutation_of("unlockLockable", "lock"),
    mutation_of("addReaction", "reactions"),
    mutation_of("removeReaction", "reactions"),
    mutation_of("deleteIssueComment", "deletions"),
    mutation_of("deletePullRequestReviewComment", "deletions"),
    mutation_of("dismissPullRequestReview", "review-verdicts"),
    mutation_of("mergePullRequest", "merge"),
    mutation_of("enablePullRequestAutoMerge", "merge"),
    mutation_of("disablePullRequestAutoMerge", "merge"),
    mutation_of("enqueuePullRequest", "merge"),
    mutation_of("dequeuePullRequest", "merge"),
    mutation_of("mergeBranch", "merges"),
    mutation_of("updatePullRequestBranch", "merges"),
    mutation_of("createRef", "refs"),
    mutation_of("updateRef", "refs"),
    mutation_of("updateRefs", "refs"),
    mutation_of("deleteRef", "refs"),
    mutation_of("createCommitOnBranch", "contents"),
    mutation_of("createBranchProtectionRule", "branch-protection"),
    mutation_of("updateBranchProtectionRule", "branch-protection"),
    mutation_of("deleteBranchProtectionRule", "branch-protection"),
    mutation_of("updateRepository", "settings"),
    mutation_of("archiveRepository", "settings"),
    mutation_of("unarchiveRepository", "settings"),
];

/// Decides about a GraphQL request, and returns the rule that allows it.
pub(super) fn judge(
    request: &GithubRequest<'_>,
    is_on: impl Fn(&str) -> bool,
) -> Result<&'static str, Denial> {
    let body = read_object(READ, request)?;
    let mut text = None;
    let mut variables = None;
    for (key, value) in &body {
        match (key.as_str(), value) {
            ("query", Value::String(query)) => text = Some(query),
            ("variables", Value::Object(map)) => variables = Some(map),
            ("variables" | "operationName", Value::Null) | ("operationName", Value::String(_)) => {}
            _ => {
                return Err(refuse(
                    READ,
                    "A GraphQL body has a 'query' and may have an object of 'variables' and an \
                     'operationName'; persisted queries and extensions are not supported.",
                ));
            }
        }
    }
    let Some(text) = text else {
        return Err(refuse(
            READ,
            "The body has no 'query'. Persisted queries are not supported: send the document.",
        ));
    };
    let document = Document::parse(text)
        .map_err(|why| refuse(READ, format!("The GraphQL document is refused: {why}.")))?;
    let empty = Map::new();
    let mut check = DocumentCheck {
        request,
        document: &document,
        variables: variables.unwrap_or(&empty),
        is_on: &is_on,
        open_fragments: Vec::new(),
        used_fragments: BTreeSet::new(),
        steps: 0,
    };
    let mut rule = READ;
    for operation in &document.operations {
        if operation.kind == Kind::Mutation {
            rule = MUTATE;
        }
        check.operation(operation)?;
    }
    if check.used_fragments.len() < document.fragments.len() {
        return Err(refuse(READ, "A fragment is never used. Remove it."));
    }
    Ok(rule)
}

/// The state of the check of one document.
struct DocumentCheck<'a, F> {
    request: &'a GithubRequest<'a>,
    document: &'a Document,
    variables: &'a Map<String, Value>,
    is_on: &'a F,
    /// The fragments around the current selection, to detect cycles.
    open_fragments: Vec<&'a str>,
    /// The fragments that were spread anywhere.
    used_fragments: BTreeSet<&'a str>,
    steps: usize,
}

/// The level of a selection: at the top of an operation, or below.
#[derive(Clone, Copy)]
enum Level {
    Top(Kind),
    Below(SelectionScope),
}

impl<'a, F: Fn(&str) -> bool> DocumentCheck<'a, F> {
    fn operation(&mut self, operation: &'a Operation) -> Result<(), Denial> {
        match operation.kind {
            Kind::Query => {}
            Kind::Mutation if (self.is_on)(MUTATE) => {}
            Kind::Mutation => {
                return Err(refuse(
                    MUTATE,
                    "GraphQL mutations are not allowed, because the repository cannot be \
                     determined from the ids in them. Use the REST endpoint under \
                     /repos/OWNER/NAME, or leave it to the operator, who can add \
                     'graphql-mutations' to egress.github.allow.",
                ));
            }
            Kind::Subscription => {
                return Err(refuse(READ, "GraphQL subscriptions are not supported."));
            }
        }
        self.selections(&operation.selections, Level::Top(operation.kind), 0)
    }

    fn selections(
        &mut self,
        selections: &'a [Selection],
        level: Level,
        depth: usize,
    ) -> Result<(), Denial> {
        if depth > MAX_DEPTH {
            return Err(refuse(READ, "The GraphQL document is nested too deeply."));
        }
        for selection in selections {
            self.steps += 1;
            if self.steps > MAX_STEPS {
                return Err(refuse(READ, "The GraphQL document is too large."));
            }
            match selection {
                Selection::Field(field) => {
                    if let Some(scope) = self.field(field, level)? {
                        self.selections(&field.selections, Level::Below(scope), depth + 1)?;
                    }
                }
                Selection::Inline(inner) => self.selections(inner, level, depth + 1)?,
                Selection::Spread(name) => self.spread(name, level, depth)?,
            }
        }
        Ok(())
    }

    fn spread(&mut self, name: &'a str, level: Level, depth: usize) -> Result<(), Denial> {
        let Some(inner) = self.document.fragments.get(name) else {
            return Err(refuse(READ, "A fragment is used that is not defined."));
        };
        if self.open_fragments.contains(&name) {
            return Err(refuse(READ, "A fragment contains itself."));
        }
        self.used_fragments.insert(name);
        self.open_fragments.push(name);
        self.selections(inner, level, depth + 1)?;
        self.open_fragments.pop();
        Ok(())
    }

    /// Checks one field, and returns the scope of its selections.
    fn field(&self, field: &Field, level: Level) -> Result<Option<SelectionScope>, Denial> {
        match level {
            Level::Top(_) if field.name == "__typename" => Ok(None),
            Level::Top(Kind::Mutation) => self.mutation(field).map(Some),
            Level::Top(_) => self.root(field).map(Some),
            // A team's organisation. The field of a user has an argument for any organisation.
            Level::Below(SelectionScope::Card)
                if field.name == "organization" && field.arguments.is_empty() =>
            {
                Ok(Some(SelectionScope::Card))
            }
            Level::Below(scope) => match scope.step(&field.name) {
                Some(scope) => Ok(Some(scope)),
                None => Err(refuse(
                    READ,
                    format!(
                        "The GraphQL field '{}' is not allowed here. Use the REST endpoint under \
                         /repos/OWNER/NAME.",
                        field.name
                    ),
                )),
            },
        }
    }

    fn root(&self, field: &Field) -> Result<SelectionScope, Denial> {
        match field.name.as_str() {
            "rateLimit" => Ok(SelectionScope::Counters),
            "__schema" | "__type" => Ok(SelectionScope::Schema),
            "viewer" if (self.is_on)("read-user") => Ok(SelectionScope::Viewer),
            "viewer" => Err(refuse_named("read-user", "The GraphQL field 'viewer'")),
            "repository" => self.repository(field),
            name => Err(refuse(
                READ,
                format!(
                    "The GraphQL field '{name}' is not allowed at the top level. Queries start at \
                     repository(owner, name) of a registered repository."
                ),
            )),
        }
    }

    fn repository(&self, field: &Field) -> Result<SelectionScope, Denial> {
        let (mut owner, mut name) = (None, None);
        for (key, value) in &field.arguments {
            match key.as_str() {
                "owner" => owner = self.text(value),
                "name" => name = self.text(value),
                "followRenames" => {}
                _ => {
                    return Err(refuse(
                        READ,
                        "The field 'repository' takes only an owner and a name.",
                    ));
                }
            }
        }
        let Some((owner, name)) = owner.zip(name) else {
            return Err(refuse(
                READ,
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

    fn mutation(&self, field: &Field) -> Result<SelectionScope, Denial> {
        let known = MUTATIONS.iter().find(|known| known.name == field.name);
        let Some(known) = known else {
            return Err(refuse(
                MUTATE,
                format!(
                    "The GraphQL mutation '{}' is not allowed. Leave it to the operator.",
                    field.name
                ),
            ));
        };
        if let Some(rule) = known.needs.filter(|rule| !(self.is_on)(rule)) {
            let what = format!("The GraphQL mutation '{}'", field.name);
            return Err(refuse_named(rule, &what));
        }
        let [(key, input)] = field.arguments.as_slice() else {
            return Err(refuse(MUTATE, "A mutation takes one argument, 'input'."));
        };
        if key != "input" {
            return Err(refuse(MUTATE, "A mutation takes one argument, 'input'."));
        }
        match known.input {
            Input::Any => {}
            Input::Only(keys) => self.check_keys(input, keys)?,
            Input::Review => self.check_review(input)?,
        }
        Ok(SelectionScope::Payload)
    }

    fn check_keys(&self, input: &Literal, known: &[&str]) -> Result<(), Denial> {
        for key in self.keys(input)? {
            match key {
                "state" if (self.is_on)("close") => {}
                "state" => return Err(refuse_named("close", "The field 'state'")),
                key if known.contains(&key) => {}
                _ => {
                    let known = known.join(", ");
                    return Err(refuse(
                        MUTATE,
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
        if !self.keys(input)?.contains(&"event") {
            return Ok(());
        }
        let event = match input {
            Literal::Object(fields) => {
                let event = fields.iter().find(|(key, _)| key == "event");
                event.and_then(|(_, value)| match value {
                    Literal::Enum(value) => Some(value.as_str()),
                    value => self.text(value),
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
            Some("APPROVE" | "REQUEST_CHANGES") if (self.is_on)("review-verdicts") => Ok(()),
            _ => Err(refuse_named(
                "review-verdicts",
                "A review whose 'event' is not COMMENT",
            )),
        }
    }

    /// The keys of an input object, in the document or in the variables.
    fn keys<'s>(&'s self, input: &'s Literal) -> Result<Vec<&'s str>, Denial> {
        match input {
            Literal::Object(fields) => Ok(fields.iter().map(|(key, _)| key.as_str()).collect()),
            Literal::Variable(name) => match self.variables.get(name) {
                Some(Value::Object(fields)) => Ok(fields.keys().map(String::as_str).collect()),
                _ => Err(refuse(
                    MUTATE,
                    "A mutation's input must be an object, or a variable with an object as its value.",
                )),
            },
            Literal::Text(_) | Literal::Enum(_) | Literal::Other => {
                Err(refuse(MUTATE, "A mutation's input must be an object."))
            }
        }
    }

    /// The text of a literal, or of a variable's value in the request.
    fn text<'s>(&'s self, value: &'s Literal) -> Option<&'s str> {
        match value {
            Literal::Text(text) => Some(text),
            Literal::Variable(name) => self.variables.get(name)?.as_str(),
            Literal::Enum(_) | Literal::Object(_) | Literal::Other => None,
        }
    }
}
