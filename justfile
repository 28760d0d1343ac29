# Tasks of this repository. `just` lists them.

export CARGO_TARGET_DIR := env("CARGO_TARGET_DIR", env("HOME") / ".cache/palisade/target")

mitmproxy := env("HOME") / ".cache/palisade/mitmproxy"
noop := env("HOME") / ".cache/palisade/noop"
oha := env("HOME") / ".cache/palisade/oha"
mcp_peers := env("HOME") / ".cache/palisade/mcp-peers"

# List the tasks
default:
    @just --list

# Everything CI runs
test *steps:
    ./test {{steps}}

# Format the code
fmt:
    cargo fmt --all

# Write docs/checks.md, docs/cli.md, docs/config.md, docs/openapi.json and the table of log messages from the code
docs:
    cargo xtask logs
    UPDATE_DOCS=1 cargo nextest run --locked --workspace -E 'test(/docs_/)'

# Replay the recorded decisions (tests/corpus); with update=1 record those of this tree
corpus update="":
    {{ if update == "" { "" } else { "UPDATE_CORPUS=1" } }} cargo nextest run --locked --workspace -E 'test(/corpus_of/)'

# One static binary: target/palisade
release:
    RUSTFLAGS="-C target-feature=+crt-static" cargo build --locked --profile dist --package palisade --target x86_64-unknown-linux-gnu
    mkdir -p target
    cp "$CARGO_TARGET_DIR/x86_64-unknown-linux-gnu/dist/palisade" target/palisade
    ldd target/palisade 2>&1 | grep 'statically linked'

# Microbenchmarks; aims are in docs/benchmarks.md
bench *args:
    cargo bench --locked --profile dist --workspace {{args}}

# Kill the gate at random moments under load (1 000 times takes a few minutes)
kills count="1000":
    PALISADE_KILLS={{count}} cargo nextest run --locked --package palisade --test durability --no-capture

# Kill the gate and its launchers at random moments of create and delete
crashes count="300":
    PALISADE_CRASHES={{count}} cargo nextest run --locked --package palisade --test sandbox --no-capture kills_at_random_moments

# Create `count` sandboxes at once and report their memory
crowd count="200":
    PALISADE_CROWD={{count}} cargo nextest run --locked --package palisade --test sandbox --no-capture many_sandboxes_run_at_once

# Measure commands on the host and in another sandbox while one sandbox has `spinners` busy sessions: with the build `before`, if given, then with this one
measure-cpu spinners="900" before="":
    cargo build --profile dist --locked --package palisade
    for binary in {{before}} "$CARGO_TARGET_DIR/dist/palisade"; do PALISADE_BINARY="$binary" PALISADE_SPINNERS={{spinners}} cargo nextest run --locked --profile long --package palisade --test sandbox --test-threads 1 --no-capture spinning_sandbox_effect || exit 1; done

# Long forms of the traffic tests: 2 GiB in each direction, 1 000 reloads under load, silent streams
traffic-long mib="2048" reloads="1000" quiet="600":
    PALISADE_BIG={{mib}} PALISADE_RELOADS={{reloads}} PALISADE_QUIET={{quiet}} cargo nextest run --locked --profile long --workspace --no-capture -E 'binary(traffic) and test(/streaming|reloading|regressions/)'

# Memory of the workbench while a command prints `mib` MiB
measure-workbench mib="1024":
    PALISADE_OUTPUT_MIB={{mib}} cargo nextest run --locked --package palisade --test workbench --cargo-profile dist --no-capture large_output

# Disconnect `count` MCP clients abruptly: no server process, descriptor or memory may be left
mcp-disconnects count="10000":
    cargo build --locked --package testkit --bin mcp-fixture
    PALISADE_DISCONNECTS={{count}} cargo nextest run --locked --profile long --package palisade --test mcp --no-capture disconnected_clients

# Compare the workbench's find and grep with ripgrep (installs it) on a tree of `files` files
bench-workbench files="50000":
    command -v rg >/dev/null || apt-get install -y -qq --no-install-recommends ripgrep
    PALISADE_FILES={{files}} cargo nextest run --locked --package palisade --test workbench --cargo-profile dist --no-capture compared_with_ripgrep

# Fuzz every target, or the named ones, for `seconds` each
fuzz seconds="60" *targets:
    fuzz/run {{seconds}} {{targets}}

# Update the lock file of the fuzz workspace after a dependency has changed
fuzz-lock:
    cp Cargo.lock fuzz/Cargo.lock
    cargo metadata --format-version 1 --manifest-path fuzz/Cargo.toml >/dev/null

# Compare sandboxes with bubblewrap and Docker in one run (installs both; Docker needs a daemon)
bench-sandboxes:
    command -v bwrap >/dev/null || apt-get install -y -qq bubblewrap
    command -v busybox >/dev/null || apt-get install -y -qq busybox-static
    -d=$(mktemp -d) && mkdir "$d/bin" && cp "$(command -v busybox)" "$d/bin/" && for a in true sleep sh; do ln -s busybox "$d/bin/$a"; done && tar -C "$d" -c . | docker import - palisade-bench; rm -r "$d"
    cargo bench --locked --profile dist --package sandbox --bench comparison

# Instructions and allocations per request of the gate, by callgrind (installs valgrind): of the build `before`, if given, and of this one
bench-instructions before="":
    command -v valgrind >/dev/null || apt-get install -y -qq --no-install-recommends valgrind
    command -v nginx >/dev/null || apt-get install -y -qq --no-install-recommends nginx-light
    command -v dnsmasq >/dev/null || apt-get install -y -qq --no-install-recommends dnsmasq-base
    cargo build --locked --profile dist --package palisade --package benches
    "$CARGO_TARGET_DIR/dist/bench-traffic" --palisade "$CARGO_TARGET_DIR/dist/palisade" {{ if before == "" { "" } else { "--before " + before } }} instructions

# Compare the gate's traffic with nginx alone and as a reverse proxy, a no-op proxy, mitmproxy and dnsmasq in one run (installs them, and oha as a second client)
bench-traffic *args:
    command -v nginx >/dev/null || apt-get install -y -qq --no-install-recommends nginx-light
    command -v dnsmasq >/dev/null || apt-get install -y -qq --no-install-recommends dnsmasq-base
    test -x {{mitmproxy}}/bin/mitmdump || { python3 -m venv {{mitmproxy}} && {{mitmproxy}}/bin/pip install -q mitmproxy; }
    test -x {{oha}}/bin/oha || cargo install --quiet --locked --root {{oha}} --target-dir {{oha}}/target oha
    cargo build --locked --release --manifest-path benches/noop/Cargo.toml --target-dir {{noop}}
    cargo build --locked --profile dist --package palisade
    cargo build --locked --profile dist --package benches
    "$CARGO_TARGET_DIR/dist/bench-traffic" --palisade "$CARGO_TARGET_DIR/dist/palisade" --mitmdump {{mitmproxy}}/bin/mitmdump --noop {{noop}}/release/noop --oha {{oha}}/bin/oha {{args}}

# Compare tool calls through the bridge with plain pipes, supergateway and mcp-proxy, and measure the hooks (installs the peers)
bench-mcp *args:
    test -x {{mcp_peers}}/node_modules/.bin/supergateway || npm install --prefix {{mcp_peers}} --no-audit --no-fund --loglevel error supergateway@4.0.0 node@22.23.3
    test -x {{mcp_peers}}/venv/bin/mcp-proxy || { python3 -m venv {{mcp_peers}}/venv && {{mcp_peers}}/venv/bin/pip install -q mcp-proxy==0.13.0; }
    cargo build --locked --profile dist --package palisade
    cargo build --locked --profile dist --package benches --package testkit
    PATH="{{mcp_peers}}/node_modules/.bin:$PATH" "$CARGO_TARGET_DIR/dist/bench-mcp" --palisade "$CARGO_TARGET_DIR/dist/palisade" --fixture "$CARGO_TARGET_DIR/dist/mcp-fixture" --supergateway {{mcp_peers}}/node_modules/.bin/supergateway --mcp-proxy {{mcp_peers}}/venv/bin/mcp-proxy {{args}}

# Measure workspaces, snapshots and merges with `files` files
measure-git files="10000":
    PALISADE_FILES={{files}} cargo nextest run --locked --package sandbox --cargo-profile dist --no-capture measured

# Time and memory for checking a push of `mib` MiB
measure-pack-reader mib="90":
    PALISADE_PUSH_MIB={{mib}} cargo nextest run --locked --package sandbox --cargo-profile dist --test pack_reader --no-capture measured

# Time clones and pushes of `mib` MiB with and without the gate (release build)
measure-git-traffic mib="200":
    cargo build --locked --profile dist --package palisade
    PALISADE_BINARY="$CARGO_TARGET_DIR/dist/palisade" PALISADE_GIT_MIB={{mib}} cargo nextest run --locked --profile long --workspace --no-capture -E 'package(palisade) and binary(=git) and test(large_repository)'

# Known vulnerabilities in dependencies (needs the advisory database, so not in CI)
audit:
    cargo deny --locked check advisories
