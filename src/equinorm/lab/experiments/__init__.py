"""Recipes: the runs behind every table and figure of the papers, and what is done with them.

artifacts                               a table or figure: its runs, the paper's numbers, the claims that they decide
common                                  what recipes share: grids of cells, choices on held-out images, toy sizes
stock2019, defazio2018, ruff2020,
repro2019, arpit2019                    one per paper; each has `artifacts()`, which lists its tables and figures
rivals, imagenette, private, federated, deep
                                        our own: today's rivals, and training without batch statistics elsewhere
stock2019_computed                      what stock2019 shows without training
reproduce                               `equinorm reproduce`: train what a store does not have of some artifacts
campaign                                `equinorm campaign`: all of them in order, in sittings of limited time
sitting                                 the same on a machine that has only torch, numpy and Pillow, and is lost
afterwards demo, demo_picture                      `equinorm demo`: a recipe on the embedded digits, in minutes

How to write one is said in docs/laboratory.md.
"""
