"""What crosses a process boundary, spelled once: subjects, streams, messages, their codec."""
