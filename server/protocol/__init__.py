"""Wire models: what a client may send, checked strictly in type and leniently in everything else.

Unknown keys are accepted, null is the same as absent, and a value that asks for something not built is refused by name.
"""
