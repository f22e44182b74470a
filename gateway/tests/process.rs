//! The binary as a process: exit codes, signals, and what it writes where no terminal is.

use std::io::{BufRead as _, BufReader};
use std::process::{Child, Command, Output, Stdio};
use std::time::Duration;

use branchline_testkit::{ScriptedWorker, Step, chunk, event_stream, last_chunk, within};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;

/// A running gateway; killed when dropped.
pub(crate) struct Process {
    child: Child,
    /// What it has written to standard error; closed at its end.
    lines: watch::Receiver<Vec<String>>,
    pub(crate) address: String,
}

fn command(arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_branchline-router"));
    command.args(arguments).stderr(Stdio::piped()).stdout(Stdio::null());
    command
}

/// Runs one to its end.
async fn output(arguments: &[&str]) -> Output {
    let mut command = command(arguments);
    let run = tokio::task::spawn_blocking(move || command.output());
    within("the end", run).await.expect("no panic").expect("it starts")
}

impl Process {
    /// Starts one on a free port and waits until it serves.
    pub(crate) async fn start(arguments: &[&str]) -> Self {
        let mut child = command(&[&["--port", "0"], arguments].concat()).spawn().expect("it starts");
        let (sender, lines) = watch::channel(Vec::new());
        let errors = BufReader::new(child.stderr.take().expect("a pipe"));
        std::thread::spawn(move || {
            for line in errors.lines().map_while(Result::ok) {
                sender.send_modify(|lines| lines.push(line));
            }
        });
        let mut process = Self { child, lines, address: String::new() };
        let line = process.wait_for_line("serving").await;
        let start = line.find("http://").expect("a URL") + "http://".len();
        process.address = line[start..].chars().take_while(|c| !matches!(c, '"' | ' ')).collect();
        process
    }

    fn signal(&self, name: &str) {
        let id = self.child.id().to_string();
        assert!(
            Command::new("kill").args([&format!("-{name}"), &id]).status().expect("kill exists").success()
        );
    }

    /// The first line with this text, once it is there.
    async fn wait_for_line(&mut self, text: &str) -> String {
        let has = |lines: &Vec<String>| lines.iter().any(|line| line.contains(text));
        let lines = within(text, self.lines.wait_for(has)).await.expect("it goes on").clone();
        assert!(!lines.concat().contains('\u{1b}'), "colour codes in a pipe: {lines:?}");
        lines.into_iter().find(|line| line.contains(text)).expect("it was there")
    }

    /// Its exit code.
    async fn ended(&mut self) -> Option<i32> {
        // The pipe closes when it ends, so that the wait does not block.
        within("the end", async { while self.lines.changed().await.is_ok() {} }).await;
        self.child.wait().expect("a status").code()
    }

    async fn stream(&self) -> TcpStream {
        let mut stream = TcpStream::connect(&self.address).await.expect("it listens");
        let body = r#"{"prompt":"x","stream":true}"#;
        let head =
            format!("POST /v1/completions HTTP/1.1\r\nhost: {}\r\nconnection: close\r\n", self.address);
        let request = format!("{head}content-length: {}\r\n\r\n{body}", body.len());
        stream.write_all(request.as_bytes()).await.expect("it reads");
        stream
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        // It has mostly ended.
        drop(self.child.kill());
        drop(self.child.wait());
    }
}

async fn read_until(stream: &mut TcpStream, text: &str) {
    let mut read = Vec::new();
    let wait = async {
        while !String::from_utf8_lossy(&read).contains(text) {
            assert!(stream.read_buf(&mut read).await.expect("it answers") > 0, "closed before {text}");
        }
    };
    within(text, wait).await;
}

/// A worker whose stream ends when `held` is false, else never.
async fn worker(held: bool) -> ScriptedWorker {
    let rest = match held {
        true => vec![Step::Hold],
        false => vec![Step::Pause(Duration::from_millis(300)), chunk(b"data: [DONE]\n\n"), last_chunk()],
    };
    let steps = [vec![event_stream(), chunk(b"data: 1\n\n")], rest].concat();
    ScriptedWorker::start(move |_| steps.clone()).await.expect("a free port")
}

/// A gateway before that worker with a live stream.
async fn serving(held: bool, more: &[&str]) -> (ScriptedWorker, Process, TcpStream) {
    let worker = worker(held).await;
    let url = worker.url();
    let mut process = Process::start(&[&["--worker-urls", url.as_str()], more].concat()).await;
    process.wait_for_line("worker is ready").await;
    let mut stream = process.stream().await;
    read_until(&mut stream, "data: 1").await;
    (worker, process, stream)
}

#[tokio::test]
async fn a_port_in_use_is_exit_code_1_and_names_the_port() {
    let taken = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
    let port = taken.local_addr().expect("bound").port().to_string();
    let output = output(&["--port", &port]).await;
    let text = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(1), "{text}");
    assert!(text.contains(&port) && text.contains("in use") && text.contains("--port"), "{text}");
}

#[tokio::test]
async fn a_wrong_flag_is_exit_code_2() {
    let output = output(&["--prot", "1"]).await;
    assert_eq!(output.status.code(), Some(2));
    assert!(String::from_utf8_lossy(&output.stderr).contains("--prot"));
}

#[tokio::test]
async fn sigterm_and_sigint_drain_and_exit_0() {
    for name in ["TERM", "INT"] {
        let (_worker, mut process, mut stream) = serving(false, &[]).await;
        process.signal(name);
        read_until(&mut stream, "[DONE]").await;
        assert_eq!(process.ended().await, Some(0), "SIG{name}");
    }
}

#[tokio::test]
async fn a_stream_that_outlives_the_drain_deadline_does_not_hold_the_exit_up() {
    let (_worker, mut process, _stream) = serving(true, &["--drain-timeout", "100ms"]).await;
    process.signal("TERM");
    assert_eq!(process.ended().await, Some(0));
}

#[tokio::test]
async fn a_second_signal_ends_it_at_once_with_exit_code_1() {
    let (_worker, mut process, _stream) = serving(true, &["--drain-timeout", "1h"]).await;
    process.signal("TERM");
    process.wait_for_line("draining").await;
    process.signal("TERM");
    assert_eq!(process.ended().await, Some(1));
}
