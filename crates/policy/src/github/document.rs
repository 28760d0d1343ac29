//! Strict parser of GraphQL documents.
//!
//! The parser is built on apollo-parser, which is meant for editors and recovers from errors. So a
//! document with any error is refused, and its syntax tree is converted node by node; an unexpected
//! node refuses the document too.

use std::collections::BTreeMap;

use apollo_parser::cst::CstNode;
use apollo_parser::{Lexer, Parser, SyntaxKind, SyntaxNode, TokenKind};

/// Maximum number of tokens of a document; the largest ones of common clients have hundreds.
const MAX_TOKENS: usize = 10_000;
/// Maximum nesting of brackets.
const MAX_DEPTH: usize = 48;

/// A parsed document.
#[derive(Debug)]
pub(super) struct Document {
    pub(super) operations: Vec<Operation>,
    pub(super) fragments: BTreeMap<String, Vec<Selection>>,
}

#[derive(Debug)]
pub(super) struct Operation {
    pub(super) kind: Kind,
    pub(super) selections: Vec<Selection>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    Query,
    Mutation,
    Subscription,
}

#[derive(Debug)]
pub(super) enum Selection {
    Field(Field),
    /// `... on Type { }`: selections on the same object, as another type.
    Inline(Vec<Selection>),
    /// `...Name`.
    Spread(String),
}

#[derive(Debug)]
pub(super) struct Field {
    /// The name of the field; its alias is ignored.
    pub(super) name: String,
    pub(super) arguments: Vec<(String, Literal)>,
    pub(super) selections: Vec<Selection>,
}

/// A value in a document.
#[derive(Debug)]
pub(super) enum Literal {
    /// A string without escapes.
    Text(String),
    /// A value of an enum.
    Enum(String),
    Variable(String),
    Object(Vec<(String, Literal)>),
    /// Any other value, which no rule depends on.
    Other,
}

/// Why a document cannot be parsed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub(super) enum BadDocument {
    #[error("the document is not GraphQL")]
    Syntax,
    #[error("the document is too large or nests too deep")]
    TooLarge,
    #[error("the document contains a block string or a control character: use variables for text")]
    Text,
    #[error("only queries, mutations and fragments are supported, with @include and @skip")]
    Unknown,
    #[error("a name is used twice")]
    Repeated,
}

impl Document {
    pub(super) fn parse(text: &str) -> Result<Self, BadDocument> {
        check_text(text)?;
        check_size(text)?;
        // The limits were checked before, so the parser's own limits must not be reached.
        let tree = Parser::new(text)
            .recursion_limit(4 * MAX_DEPTH)
            .token_limit(2 * MAX_TOKENS)
            .parse();
        if tree.errors().next().is_some() {
            return Err(BadDocument::Syntax);
        }
        let mut document = Self {
            operations: Vec::new(),
            fragments: BTreeMap::new(),
        };
        for node in tree.document().syntax().children() {
            match node.kind() {
                SyntaxKind::OPERATION_DEFINITION => {
                    document.operations.push(read_operation(&node)?);
                }
                SyntaxKind::FRAGMENT_DEFINITION => {
                    let (name, selections) = read_fragment(&node)?;
                    if document.fragments.insert(name, selections).is_some() {
                        return Err(BadDocument::Repeated);
                    }
                }
                _ => return Err(BadDocument::Unknown),
            }
        }
        if document.operations.is_empty() {
            return Err(BadDocument::Unknown);
        }
        Ok(document)
    }
}

/// Refuses characters that lexers treat differently: they disagree on where a block string ends and
/// on which characters end a line, and with it a comment. One lexer would read the rest as text,
/// another as fields.
fn check_text(text: &str) -> Result<(), BadDocument> {
    let mut chars = text.chars().peekable();
    while let Some(c) = chars.next() {
        let is_fine = match c {
            '\n' | '\t' => true,
            '\r' => chars.peek() == Some(&'\n'),
            '\u{feff}' | '\u{2028}' | '\u{2029}' => false,
            c => !c.is_control(),
        };
        if !is_fine {
            return Err(BadDocument::Text);
        }
    }
    if text.contains("\"\"\"") {
        return Err(BadDocument::Text);
    }
    Ok(())
}

fn check_size(text: &str) -> Result<(), BadDocument> {
    let mut depth = 0_usize;
    for (count, token) in Lexer::new(text).enumerate() {
        let token = token.map_err(|_| BadDocument::Syntax)?;
        match token.kind() {
            TokenKind::LCurly | TokenKind::LBracket | TokenKind::LParen => depth += 1,
            TokenKind::RCurly | TokenKind::RBracket | TokenKind::RParen => {
                depth = depth.checked_sub(1).ok_or(BadDocument::Syntax)?;
            }
            _ => {}
        }
        if depth > MAX_DEPTH || count >= MAX_TOKENS {
            return Err(BadDocument::TooLarge);
        }
    }
    Ok(())
}

fn read_operation(node: &SyntaxNode) -> Result<Operation, BadDocument> {
    let mut kind = Kind::Query;
    let mut selections = None;
    for child in node.children() {
        match child.kind() {
            SyntaxKind::OPERATION_TYPE => {
                kind = match node_text(&child).as_str() {
                    "query" => Kind::Query,
                    "mutation" => Kind::Mutation,
                    "subscription" => Kind::Subscription,
                    _ => return Err(BadDocument::Unknown),
                }
            }
            SyntaxKind::NAME => {}
            SyntaxKind::VARIABLE_DEFINITIONS => check_definitions(&child)?,
            SyntaxKind::SELECTION_SET => set_once(&mut selections, read_selections(&child)?)?,
            _ => return Err(BadDocument::Unknown),
        }
    }
    Ok(Operation {
        kind,
        selections: selections.ok_or(BadDocument::Syntax)?,
    })
}

/// Checks variable definitions. Types and defaults are ignored: only values in the request count.
fn check_definitions(node: &SyntaxNode) -> Result<(), BadDocument> {
    let mut directives = node.descendants().map(|node| node.kind());
    if directives.any(|kind| kind == SyntaxKind::DIRECTIVE) {
        return Err(BadDocument::Unknown);
    }
    Ok(())
}

fn read_fragment(node: &SyntaxNode) -> Result<(String, Vec<Selection>), BadDocument> {
    let (mut name, mut selections) = (None, None);
    for child in node.children() {
        match child.kind() {
            SyntaxKind::FRAGMENT_NAME => set_once(&mut name, node_text(&child))?,
            SyntaxKind::TYPE_CONDITION => {}
            SyntaxKind::SELECTION_SET => set_once(&mut selections, read_selections(&child)?)?,
            _ => return Err(BadDocument::Unknown),
        }
    }
    name.zip(selections).ok_or(BadDocument::Syntax)
}

fn read_selections(node: &SyntaxNode) -> Result<Vec<Selection>, BadDocument> {
    node.children()
        .map(|child| read_selection(&child))
        .collect()
}

fn read_selection(node: &SyntaxNode) -> Result<Selection, BadDocument> {
    let kind = node.kind();
    let (mut name, mut selections) = (None, None);
    let mut arguments = Vec::new();
    for child in node.children() {
        match (kind, child.kind()) {
            (SyntaxKind::FIELD, SyntaxKind::ALIAS)
            | (SyntaxKind::INLINE_FRAGMENT, SyntaxKind::TYPE_CONDITION) => {}
            (SyntaxKind::FIELD, SyntaxKind::NAME)
            | (SyntaxKind::FRAGMENT_SPREAD, SyntaxKind::FRAGMENT_NAME) => {
                set_once(&mut name, node_text(&child))?;
            }
            (SyntaxKind::FIELD, SyntaxKind::ARGUMENTS) => {
                for argument in child.children() {
                    let argument = read_named(&argument, SyntaxKind::ARGUMENT)?;
                    push_unique(&mut arguments, argument)?;
                }
            }
            (SyntaxKind::FIELD | SyntaxKind::INLINE_FRAGMENT, SyntaxKind::SELECTION_SET) => {
                set_once(&mut selections, read_selections(&child)?)?;
            }
            (_, SyntaxKind::DIRECTIVES) => check_directives(&child)?,
            _ => return Err(BadDocument::Unknown),
        }
    }
    match kind {
        SyntaxKind::FIELD => Ok(Selection::Field(Field {
            name: name.ok_or(BadDocument::Syntax)?,
            arguments,
            selections: selections.unwrap_or_default(),
        })),
        SyntaxKind::INLINE_FRAGMENT => {
            let selections = selections.ok_or(BadDocument::Syntax)?;
            Ok(Selection::Inline(selections))
        }
        SyntaxKind::FRAGMENT_SPREAD => Ok(Selection::Spread(name.ok_or(BadDocument::Syntax)?)),
        _ => Err(BadDocument::Unknown),
    }
}

/// Allows only `@include` and `@skip`, which only remove selections.
fn check_directives(node: &SyntaxNode) -> Result<(), BadDocument> {
    for directive in node.children() {
        let mut names = directive.children();
        let name = names.find(|child| child.kind() == SyntaxKind::NAME);
        let name = name.map(|name| node_text(&name));
        if !matches!(name.as_deref(), Some("include" | "skip")) {
            return Err(BadDocument::Unknown);
        }
    }
    Ok(())
}

/// Reads `name: value`.
fn read_named(node: &SyntaxNode, kind: SyntaxKind) -> Result<(String, Literal), BadDocument> {
    let mut parts = node.children();
    match (parts.next(), parts.next(), parts.next()) {
        (Some(name), Some(value), None)
            if node.kind() == kind && name.kind() == SyntaxKind::NAME =>
        {
            Ok((node_text(&name), read_literal(&value)?))
        }
        _ => Err(BadDocument::Unknown),
    }
}

fn read_literal(node: &SyntaxNode) -> Result<Literal, BadDocument> {
    Ok(match node.kind() {
        SyntaxKind::STRING_VALUE => {
            let quoted = node_text(node);
            let text = quoted.strip_prefix('"').and_then(|t| t.strip_suffix('"'));
            match text {
                Some(text) if !text.contains(['\\', '"']) => Literal::Text(text.to_owned()),
                _ => Literal::Other,
            }
        }
        SyntaxKind::ENUM_VALUE => Literal::Enum(node_text(node)),
        SyntaxKind::VARIABLE => {
            let written = node_text(node);
            let name = written.strip_prefix('$').ok_or(BadDocument::Syntax)?;
            Literal::Variable(name.to_owned())
        }
        SyntaxKind::OBJECT_VALUE => {
            let mut fields = Vec::new();
            for field in node.children() {
                push_unique(&mut fields, read_named(&field, SyntaxKind::OBJECT_FIELD)?)?;
            }
            Literal::Object(fields)
        }
        SyntaxKind::INT_VALUE
        | SyntaxKind::FLOAT_VALUE
        | SyntaxKind::BOOLEAN_VALUE
        | SyntaxKind::NULL_VALUE
        | SyntaxKind::LIST_VALUE => Literal::Other,
        _ => return Err(BadDocument::Unknown),
    })
}

fn set_once<T>(slot: &mut Option<T>, value: T) -> Result<(), BadDocument> {
    match slot.replace(value) {
        None => Ok(()),
        Some(_) => Err(BadDocument::Syntax),
    }
}

fn push_unique(
    list: &mut Vec<(String, Literal)>,
    entry: (String, Literal),
) -> Result<(), BadDocument> {
    if list.iter().any(|(name, _)| *name == entry.0) {
        return Err(BadDocument::Repeated);
    }
    list.push(entry);
    Ok(())
}

/// The text of a node without white space, commas and comments.
fn node_text(node: &SyntaxNode) -> String {
    let ignored = [
        SyntaxKind::WHITESPACE,
        SyntaxKind::COMMENT,
        SyntaxKind::COMMA,
    ];
    node.descendants_with_tokens()
        .filter_map(|element| element.into_token())
        .filter(|token| !ignored.contains(&token.kind()))
        .map(|token| token.text().to_owned())
        .collect()
}
