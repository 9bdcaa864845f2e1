"""`noetl test`: a playbook's own tests, run on the real core with mocked tools and no backend.

specification   the test file: what is mocked, what is expected
mocks           what a tool answers instead of being called
dry_run         one execution: the broker's decisions, the worker's rendering, in memory
expectations    what was expected against what happened
runner          files to outcomes
"""
