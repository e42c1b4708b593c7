"""The behaviours that clients of the OpenAI API rely on, as checks of any server that offers it.

wire: HTTP with every byte kept. probe: what a check may ask of the server under test. book: the
checks and how they are run. checks/: the behaviours. report, commands: what is said of it.
"""
