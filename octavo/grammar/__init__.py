"""Structured output: what a request may write, as a watcher that masks what would break it.

`Grammars` (compiled.py) makes watchers for one tokenizer, `Trial` (trial.py) tries a stranger's
grammar in a process that can be killed, `worker.py` is that process.
"""
