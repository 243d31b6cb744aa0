"""Source mutations, each with the test that must notice it.

``scripts/mutate`` copies the tree, proves the named tests green on the copy, and then applies one mutation at a time. A mutation
that its test does not notice is a hole in the tests: strengthen the test, never the mutation.
"""
