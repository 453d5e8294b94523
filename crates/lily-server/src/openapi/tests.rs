use std::cell::RefCell;
use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

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

/// The part of `docs/api.md` that has the tests, from the headings on.
fn table() -> (String, Vec<(String, String)>) {
    let all = include_str!("../../../../docs/api.md");
    let (_, table) = all.split_once("\n## Every endpoint and field, and its test\n").unwrap();
    let mut parts = table.split("\n### ");
    let endpoints = parts.next().unwrap().to_owned();
    let parts = parts.map(|part| part.split_once('\n').unwrap());
    (endpoints, parts.map(|(name, rows)| (name.to_owned(), rows.to_owned())).collect())
}

/// The texts in backticks of each cell of each row.
fn rows(table: &str) -> impl Iterator<Item = Vec<Vec<&str>>> {
    let rows = table.lines().filter(|line| line.starts_with("| `"));
    rows.map(|row| row.split('|').map(|cell| cell.split('`').skip(1).step_by(2).collect()).collect())
}

/// All fields of a schema itself, by their paths; those of schemas that it refers to have tables of their own.
fn paths(schema: &Value, path: &str, to: &mut BTreeSet<String>) {
    for (name, property) in schema["properties"].as_object().into_iter().flatten() {
        let path = if path.is_empty() { name.clone() } else { format!("{path}.{name}") };
        to.insert(path.clone());
        paths(property, &path, to);
    }
    for kind in ["allOf", "anyOf"] {
        schema[kind].as_array().into_iter().flatten().for_each(|part| paths(part, path, to));
    }
    if let Some(items) = schema.get("items") {
        paths(items, &format!("{path}[]"), to);
    }
}

/// Names of the schemas that a schema refers to.
fn references(node: &Value, to: &mut BTreeSet<String>) {
    match node {
        Value::Object(members) => {
            to.extend(node["$ref"].as_str().and_then(|path| path.rsplit('/').next()).map(str::to_owned));
            members.values().for_each(|member| references(member, to));
        }
        Value::Array(items) => items.iter().for_each(|item| references(item, to)),
        _ => {}
    }
}

/// Whether there is such a test; `name` is `FILE::FUNCTION`.
fn exists(name: &str) -> bool {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let (file, function) = name.split_once("::").unwrap();
    let folders = ["lily-server", "lily-engine", "lily-model", "lily"]
        .iter()
        .flat_map(|name| ["src", "tests"].map(|kind| root.join("crates").join(name).join(kind)));
    let rust = folders.map(|folder| (folder.join(format!("{file}.rs")), format!("fn {function}(")));
    let python = (root.join("tests/clients").join(format!("{file}.py")), format!("def {function}("));
    rust.chain([python]).any(|(path, text)| fs::read_to_string(path).is_ok_and(|all| all.contains(&text)))
}

#[test]
fn the_table_has_every_endpoint_and_field_and_its_tests_exist() {
    let document = document();
    let (endpoints, parts) = table();
    let mut named: Vec<String> =
        rows(&endpoints).flat_map(|row| row[1].clone()).map(str::to_lowercase).collect();
    let routes = document["paths"].as_object().unwrap().iter();
    let mut routes: Vec<String> = routes
        .flat_map(|(path, methods)| {
            methods.as_object().unwrap().keys().map(move |method| format!("{method} {path}"))
        })
        .collect();
    named.sort();
    routes.sort();
    assert_eq!(named, routes);

    // The schemas of requests, and those that they are made of.
    let schemas = &document["components"]["schemas"];
    let mut wanted = BTreeSet::new();
    for methods in document["paths"].as_object().unwrap().values() {
        methods
            .as_object()
            .unwrap()
            .values()
            .for_each(|method| references(&method["requestBody"], &mut wanted));
    }
    loop {
        let before = wanted.len();
        wanted.clone().iter().for_each(|name| references(&schemas[name], &mut wanted));
        if wanted.len() == before {
            break;
        }
    }
    assert_eq!(parts.iter().map(|(name, _)| name.clone()).collect::<BTreeSet<_>>(), wanted);

    let mut tests = BTreeSet::new();
    tests.extend(rows(&endpoints).flat_map(|row| row[2].clone()));
    for (name, part) in &parts {
        let mut expected = BTreeSet::new();
        paths(&schemas[name], "", &mut expected);
        let mut found = BTreeSet::new();
        for row in rows(part) {
            for field in &row[1] {
                assert!(found.insert((*field).to_owned()), "{name} has {field} twice");
            }
            assert!(!row[3].is_empty(), "{name}: {:?} has no test", row[1]);
            tests.extend(row[3].clone());
        }
        assert_eq!(found, expected, "{name}");
        let words =
            part.lines().filter(|line| line.starts_with("| `")).filter_map(|line| line.split(" | ").nth(1));
        assert!(words.into_iter().all(|word| ["honoured", "ignored", "refused"].contains(&word)), "{name}");
    }
    let missing: Vec<&&str> = tests.iter().filter(|test| !exists(test)).collect();
    assert!(missing.is_empty(), "there are no such tests: {missing:?}");
}
