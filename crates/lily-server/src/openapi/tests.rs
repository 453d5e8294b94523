use std::cell::RefCell;
use std::collections::BTreeSet;

use serde_json::Value;

use super::DOCUMENT;

thread_local! {
    static READ: RefCell<BTreeSet<String>> = const { RefCell::new(BTreeSet::new()) };
}

/// A field was looked for in a request.
pub(crate) fn record(path: String) {
    READ.with_borrow_mut(|read| read.insert(path));
}

fn document() -> Value {
    serde_json::from_str(DOCUMENT).unwrap()
}

/// Forgets what was looked for on this thread.
pub(crate) fn forget() {
    READ.take();
}

/// Checks that the schema of a request has all fields that were looked for on this thread, and on its first level
/// no others.
#[track_caller]
pub(crate) fn check_schema(name: &str) {
    let document = document();
    let schema = vec![&document["components"]["schemas"][name]];
    assert!(schema[0].is_object(), "there is no schema {name}");
    let read = READ.take();
    for path in &read {
        // A path like `tools[0].function.name`.
        let steps = path.split('.').flat_map(|step| step.split_inclusive('['));
        let mut nodes = schema.clone();
        for step in steps {
            let all = expand(&document, nodes).into_iter();
            nodes = match step.trim_end_matches('[') {
                index if index.ends_with(']') => all.filter_map(|node| node.get("items")).collect(),
                name => all.filter_map(|node| node["properties"].get(name)).collect(),
            };
        }
        assert!(nodes.iter().any(|node| node.is_object()), "{path} is read, but not in the schema {name}");
    }
    for node in expand(&document, schema) {
        for field in node["properties"].as_object().into_iter().flatten().map(|(field, _)| field) {
            assert!(read.contains(field), "{field} is in the schema {name}, but never read");
        }
    }
}

/// Schemas with all that they are made of.
fn expand<'a>(document: &'a Value, mut nodes: Vec<&'a Value>) -> Vec<&'a Value> {
    let mut all = Vec::new();
    while let Some(node) = nodes.pop() {
        all.push(node);
        if let Some(path) = node["$ref"].as_str() {
            let found = document.pointer(path.trim_start_matches('#'));
            nodes.push(found.unwrap_or_else(|| panic!("{path} leads nowhere")));
        }
        for kind in ["allOf", "anyOf"] {
            nodes.extend(node[kind].as_array().into_iter().flatten());
        }
    }
    all
}

#[test]
fn every_route_is_in_the_document() {
    let routes = include_str!("../app.rs").split(".route(\"").skip(1);
    let mut routes: Vec<String> = routes
        .map(|route| {
            let (path, rest) = route.split_once("\", ").unwrap();
            let (method, _) = rest.split_once('(').unwrap();
            format!("{method} {}", path.replace("{*", "{"))
        })
        .collect();
    // Of the router in the tests.
    routes.retain(|route| route != "get /");
    let document = document();
    let paths = document["paths"].as_object().unwrap().iter();
    let mut documented: Vec<String> = paths
        .flat_map(|(path, methods)| {
            methods.as_object().unwrap().keys().map(move |method| format!("{method} {path}"))
        })
        .collect();
    routes.sort();
    documented.sort();
    assert!(routes.len() > 10, "{routes:?}");
    assert_eq!(routes, documented);
}

#[test]
fn references_lead_somewhere_and_the_version_is_the_programs() {
    let document = document();
    assert_eq!(document["info"]["version"], env!("CARGO_PKG_VERSION"));
    let mut nodes = vec![&document];
    while let Some(node) = nodes.pop() {
        if node["$ref"].is_string() {
            expand(&document, vec![node]);
        }
        nodes.extend(node.as_object().into_iter().flatten().map(|(_, member)| member));
        nodes.extend(node.as_array().into_iter().flatten());
    }
}
