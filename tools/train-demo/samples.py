#!/usr/bin/env python3
"""python samples.py LILY > ../../docs/demo-samples.md

Ten chats, ten continuations and five tool calls by the demo model as it ships, seed 0, as Markdown.
Each prompt is run once."""
import datetime
import json
import platform
import subprocess
import sys
import tempfile

CHATS = ["Tell me a story about a fox", "Tell me a bedtime story about a dragon who cannot sleep.", "Hello, who are you?", "What does the word \"lantern\" mean?", "What is the capital of Japan?",
         "What is 12 plus 30?", "Have you seen any good films lately?", "Tell me about Iceland.", "Write a passage about the sea.", "I am sad today."]
BEGINNINGS = ["Once upon a time, in a small house by the river,", "The captain looked at the map and said,", "It was a dark and stormy night.", "\"I do not believe you,\" said the girl.",
              "When the sun rose over the mountains,", "The old man opened the box, and inside he found", "Dear Sir,", "There are three things that every sailor must know.", "The forest was silent.",
              "Mrs. Brown put down her cup and sighed."]
CALLS = ["What is the weather in Madrid?", "What is 345 times 27?", "Search for the history of chocolate.", "Please set a timer for 10 minutes.", "Book a table in the garden for Maria on Friday."]


def five_tools():
    def tool(_name, _description, **props):
        return {"type": "function", "function": {"name": _name, "description": _description, "parameters": {
            "type": "object", "properties": {k: {"type": v} for k, v in props.items()}, "required": list(props)}}}
    return [[tool("get_weather", "Get the current weather in a city.", city="string")], [tool("calculator", "Evaluate an expression.", expression="string")],
            [tool("web_search", "Search the web.", query="string")], [tool("set_timer", "Start a timer.", minutes="integer"), tool("get_time", "The time in a city.", city="string")],
            [tool("book_table", "Book a table.", place="string", name="string", day="string")]]


def run(prompt, *options):
    out = subprocess.run([sys.argv[1], "run", "--device", "cpu", "--json", "--seed", "0", *options, prompt], check=True, capture_output=True, text=True)
    return json.loads(out.stdout)


def show(title, prompt, answer):
    print(f"**{title}** {prompt}\n")
    print("\n".join("> " + line for line in answer.replace("<", "\\<").split("\n")), "\n")


def main():
    version = subprocess.run([sys.argv[1], "--version"], check=True, capture_output=True, text=True).stdout.strip()
    print("# What the demo model says\n\n"
          f"Made by `tools/train-demo/samples.py` with {version}, default arithmetic, on a CPU ({platform.machine()}), {datetime.date.today()}: the\n"
          "built-in model, seed 0, each prompt once, nothing left out. A thought stands in italics before its answer.\n")
    for i, prompt in enumerate(CHATS):
        reply = run(prompt, "-n", "320", *([] if i % 2 else ["--no-think"]))
        thought = f"*{reply['reasoning']}*\n\n" if reply["reasoning"] else ""
        show("User" + (", thinking on:" if i % 2 else ":"), prompt, thought + reply["text"])
    for prompt in BEGINNINGS:
        show("Beginning:", prompt, run(prompt, "--raw", "-n", "100")["text"])
    for prompt, tools in zip(CALLS, five_tools()):
        with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
            json.dump(tools, file)
            file.flush()
            reply = run(prompt, "--no-think", "-n", "120", "--tools", file.name)
        calls = [f"{c['function']['name']}({c['function']['arguments']})" for c in reply["tool_calls"]]
        show(f"Tools {', '.join(t['function']['name'] for t in tools)}; user:", prompt, "\n".join(calls + [reply["text"]]).strip() or "(nothing)")


if __name__ == "__main__":
    main()
