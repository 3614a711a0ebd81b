import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).parent))  # stored_checkpoints.py and the programs that tests start
