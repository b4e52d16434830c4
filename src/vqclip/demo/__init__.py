"""``vqclip demo``: a page in the browser that shows what a tokenizer makes of an image and of a caption.

answers.py   a visitor's input → ids, bits, probabilities, nearest items; no Gradio
page.py      the page, in Gradio, and its server
"""
