"""The commands of ``vqclip``: a class each, whose fields are its options (`vqclip.cli.options.Command`).

Last in the flow: a command calls one of the packages before it; nothing imports this one.
"""
