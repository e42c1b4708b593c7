"""`octavo lab`: the field's claims as experiments that run here, in under two minutes each.

An experiment is a module: `measure` returns plain values, `finding` makes of them a table and a
paragraph that says what they show, and a picture. Those on the real engine play on `stage`.
`commands` lists them.
"""
