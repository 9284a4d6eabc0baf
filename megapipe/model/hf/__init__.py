"""Classes of transformers as models: ``model.source=hf:FOLDER``.

The class's own forward is run with stand-ins in place of its layers, which note how it calls them.
So nothing of a class is written again here, and no file names one.
"""
