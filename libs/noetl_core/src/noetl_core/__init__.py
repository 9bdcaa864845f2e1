"""What every NoETL service shares.

Imports point one way: process -> store, bus, blob -> wire -> domain.
"""
