"""The commands of ``vqclip`` and their arguments.

Last in the flow: a command reads its arguments and calls one of the packages before it; nothing imports this one.
"""
