import os

from dapo.cli import main

# torchrun has started several of us. (WORLD_SIZE alone is set by other programs, too.)
if "TORCHELASTIC_RUN_ID" in os.environ and int(os.environ["WORLD_SIZE"]) > 1:
    from dapo.cluster import torchrun

    torchrun.run(main)
else:
    main()
