"""Makes golden values of our own schemes with numpy and hashlib alone.

No line of it is shared with ``src``, so an error has to be made twice to stay unseen. Run
``python -m tests.golden.make`` to write the files in ``tests/golden/data`` anew.
"""
