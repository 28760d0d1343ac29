//! What a GraphQL request may ask.
//!
//! Every operation of a document is judged, whichever the request names. Queries start at
//! `repository(owner, name)` of the registered set and go where [`Place`] lets them.
//! Fragments are followed wherever they are spread, and judged there.

use std::collections::BTreeSet;

use serde_json::{Map, Value};

use crate::verdict::Denial;

use super::body::read_object;
use super::document::{Document, Field, Kind, Literal, Operation, Selection};
use super::fields::Place;
use super::{GithubRequest, is_named, refuse, refuse_named};

const READ: &str = "graphql-read";
const MUTATE: &str = "graphql-mutations";

/// How often a selection may be looked at, fragments counted wherever they are spread.
const MOST_STEPS: usize = 20_000;
/// How deep selections may nest, fragments followed.
const DEEPEST: usize = 48;

/// A mutation that may be asked for.
struct Mutation {
    name: &'static str,
    /// The rule it needs beside `graphql-mutations`.
    needs: Option<&'static str>,
    input: Input,
}

/// What of a mutation's input decides.
#[derive(Clone, Copy)]
enum Input {
    /// Nothing.
    Any,
    /// No other keys than these; `state` with the rule `close`.
    Only(&'static [&'static str]),
    /// The event must be COMMENT without the rule `review-verdicts`.
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

/// Decides, and names the rule that allows.
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
                     'operationName'; persisted queries and extensions are not judged.",
                ));
            }
        }
    }
    let Some(text) = text else {
        return Err(refuse(
            READ,
            "The body has no 'query'. Persisted queries are not judged: send the document.",
        ));
    };
    let document = Document::parse(text)
        .map_err(|why| refuse(READ, format!("GraphQL that cannot be judged: {why}.")))?;
    let empty = Map::new();
    let mut walk = Walk {
        request,
        document: &document,
        variables: variables.unwrap_or(&empty),
        is_on: &is_on,
        trail: Vec::new(),
        seen: BTreeSet::new(),
        steps: 0,
    };
    let mut rule = READ;
    for operation in &document.operations {
        if operation.kind == Kind::Mutation {
            rule = MUTATE;
        }
        walk.operation(operation)?;
    }
    if walk.seen.len() < document.fragments.len() {
        return Err(refuse(READ, "A fragment is never spread. Take it out."));
    }
    Ok(rule)
}

/// One document on its way through the rules.
struct Walk<'a, F> {
    request: &'a GithubRequest<'a>,
    document: &'a Document,
    variables: &'a Map<String, Value>,
    is_on: &'a F,
    /// The fragments that are being followed.
    trail: Vec<&'a str>,
    /// The fragments that were followed at all.
    seen: BTreeSet<&'a str>,
    steps: usize,
}

/// Where a selection stands: at the top of an operation, or somewhere below.
#[derive(Clone, Copy)]
enum Stand {
    Top(Kind),
    Below(Place),
}

impl<'a, F: Fn(&str) -> bool> Walk<'a, F> {
    fn operation(&mut self, operation: &'a Operation) -> Result<(), Denial> {
        match operation.kind {
            Kind::Query => {}
            Kind::Mutation if (self.is_on)(MUTATE) => {}
            Kind::Mutation => {
                return Err(refuse(
                    MUTATE,
                    "GraphQL mutations name their subject by an id that cannot be tied to a \
                     repository. Use the REST endpoint under /repos/OWNER/NAME, or leave it to \
                     the operator, who can add 'graphql-mutations' to egress.github.allow.",
                ));
            }
            Kind::Subscription => {
                return Err(refuse(READ, "GraphQL subscriptions are not served."));
            }
        }
        self.selections(&operation.selections, Stand::Top(operation.kind), 0)
    }

    fn selections(
        &mut self,
        selections: &'a [Selection],
        stand: Stand,
        depth: usize,
    ) -> Result<(), Denial> {
        if depth > DEEPEST {
            return Err(refuse(READ, "The GraphQL document nests too deep."));
        }
        for selection in selections {
            self.steps += 1;
            if self.steps > MOST_STEPS {
                return Err(refuse(READ, "The GraphQL document is too large."));
            }
            match selection {
                Selection::Field(field) => {
                    if let Some(place) = self.field(field, stand)? {
                        self.selections(&field.selections, Stand::Below(place), depth + 1)?;
                    }
                }
                Selection::Inline(inner) => self.selections(inner, stand, depth + 1)?,
                Selection::Spread(name) => self.spread(name, stand, depth)?,
            }
        }
        Ok(())
    }

    fn spread(&mut self, name: &'a str, stand: Stand, depth: usize) -> Result<(), Denial> {
        let Some(inner) = self.document.fragments.get(name) else {
            return Err(refuse(READ, "A fragment is spread that is not defined."));
        };
        if self.trail.contains(&name) {
            return Err(refuse(READ, "A fragment spreads itself."));
        }
        self.seen.insert(name);
        self.trail.push(name);
        self.selections(inner, stand, depth + 1)?;
        self.trail.pop();
        Ok(())
    }

    /// Judges one field and says where its selections stand.
    fn field(&self, field: &Field, stand: Stand) -> Result<Option<Place>, Denial> {
        match stand {
            Stand::Top(_) if field.name == "__typename" => Ok(None),
            Stand::Top(Kind::Mutation) => self.mutation(field).map(Some),
            Stand::Top(_) => self.root(field).map(Some),
            // A team's organisation. A person's takes the name of any.
            Stand::Below(Place::Card)
                if field.name == "organization" && field.arguments.is_empty() =>
            {
                Ok(Some(Place::Card))
            }
            Stand::Below(place) => match place.step(&field.name) {
                Some(place) => Ok(Some(place)),
                None => Err(refuse(
                    READ,
                    format!(
                        "The GraphQL field '{}' is not among those that may be asked for here. \
                         Use the REST endpoint under /repos/OWNER/NAME.",
                        field.name
                    ),
                )),
            },
        }
    }

    fn root(&self, field: &Field) -> Result<Place, Denial> {
        match field.name.as_str() {
            "rateLimit" => Ok(Place::Counters),
            "__schema" | "__type" => Ok(Place::Schema),
            "viewer" if (self.is_on)("read-user") => Ok(Place::Viewer),
            "viewer" => Err(refuse_named("read-user", "The GraphQL field 'viewer'")),
            "repository" => self.repository(field),
            name => Err(refuse(
                READ,
                format!(
                    "The GraphQL field '{name}' is not a way in. Queries start at \
                     repository(owner, name) of a registered repository."
                ),
            )),
        }
    }

    fn repository(&self, field: &Field) -> Result<Place, Denial> {
        let (mut owner, mut name) = (None, None);
        for (key, value) in &field.arguments {
            match key.as_str() {
                "owner" => owner = self.text(value),
                "name" => name = self.text(value),
                "followRenames" => {}
                _ => return Err(refuse(READ, "repository takes an owner and a name.")),
            }
        }
        let Some((owner, name)) = owner.zip(name) else {
            return Err(refuse(
                READ,
                "The owner and name of a repository must be plain strings, or variables that \
                 the request gives a value.",
            ));
        };
        let mut repos = self.request.repos.iter();
        if repos.any(|repo| is_named(repo, owner, name)) {
            Ok(Place::Repository)
        } else {
            Err(refuse(
                "repository",
                "The query is about a repository the sandbox was not registered for. Ask the \
                 operator to register it.",
            ))
        }
    }

    fn mutation(&self, field: &Field) -> Result<Place, Denial> {
        let known = MUTATIONS.iter().find(|known| known.name == field.name);
        let Some(known) = known else {
            return Err(refuse(
                MUTATE,
                format!(
                    "The GraphQL mutation '{}' is not one that is known here. Leave it to the \
                     operator.",
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
        Ok(Place::Payload)
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
                        format!("The input has a field that is not known here. Known are {known}."),
                    ));
                }
            }
        }
        Ok(())
    }

    /// A review without an event waits for one, and is judged when it is submitted.
    fn check_review(&self, input: &Literal) -> Result<(), Denial> {
        if !self.keys(input)?.contains(&"event") {
            return Ok(());
        }
        let event = match input {
            Literal::Object(fields) => {
                let event = fields.iter().find(|(key, _)| key == "event");
                event.and_then(|(_, value)| match value {
                    Literal::Word(word) => Some(word.as_str()),
                    value => self.text(value),
                })
            }
            Literal::Variable(name) => {
                let input = self.variables.get(name);
                input.and_then(|input| input.get("event")?.as_str())
            }
            Literal::Text(_) | Literal::Word(_) | Literal::Other => None,
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

    /// The keys of an input object, wherever it stands.
    fn keys<'s>(&'s self, input: &'s Literal) -> Result<Vec<&'s str>, Denial> {
        match input {
            Literal::Object(fields) => Ok(fields.iter().map(|(key, _)| key.as_str()).collect()),
            Literal::Variable(name) => match self.variables.get(name) {
                Some(Value::Object(fields)) => Ok(fields.keys().map(String::as_str).collect()),
                _ => Err(refuse(
                    MUTATE,
                    "A mutation's input must be an object that the request gives a value.",
                )),
            },
            Literal::Text(_) | Literal::Word(_) | Literal::Other => {
                Err(refuse(MUTATE, "A mutation's input must be an object."))
            }
        }
    }

    /// The text of a literal, or of a variable that the request gives a value.
    fn text<'s>(&'s self, value: &'s Literal) -> Option<&'s str> {
        match value {
            Literal::Text(text) => Some(text),
            Literal::Variable(name) => self.variables.get(name)?.as_str(),
            Literal::Word(_) | Literal::Object(_) | Literal::Other => None,
        }
    }
}
