"""Common English words; with a space before it each is one token in the usual vocabularies."""

_LINES = (
    "time people year way day man thing woman life child world school state family student group country problem hand",
    "part place case week company system program question work government number night point home water room mother",
    "area money story fact month lot right study book eye job word business issue side kind head house service friend",
    "father power hour game line end member law car city community name president team minute idea body information",
    "back parent face others level office door health person art war history party result change morning reason",
    "research girl guy moment air teacher force education foot boy age policy music market sense nation plan college",
    "interest death experience effect use class control field development role effort rate heart drug show leader",
    "light voice wife police mind price report decision son view relationship town road arm difference value building",
    "action season society tax director position player record paper space ground form event official matter center",
    "couple site project activity star table need court oil situation cost industry figure street image phone data",
    "picture practice piece land product doctor wall patient worker news test movie north love support technology",
    "step baby computer type attention film tree source red nothing board interview window summer south blood west",
    "rock food language animal black white green blue river mountain ocean island forest garden flower bird fish",
    "horse dog cat rain snow wind fire stone metal gold silver glass wood cotton bread fruit sugar salt meat rice",
    "wine coffee tea milk egg bank store shop train plane ship boat bridge station airport hotel kitchen bedroom",
    "floor roof wing engine wheel machine tool weapon army navy battle peace king queen prince church god spirit soul",
    "dream hope fear anger pain joy smile tear laugh cry song dance dress hat shoe coat ring box bag cup plate knife",
    "spoon chair desk bed lamp clock watch key lock letter card note list page map chart code file disk screen cable",
    "radio signal network path track race goal ball match score coach club league final round shot pass run walk jump",
    "swim fly drive ride climb fall rise grow build make take give find tell ask seem feel try leave call good new",
    "first last long great little own other old big high different small large next early young important few public",
    "bad same able",
)
WORDS: tuple[str, ...] = tuple(word for line in _LINES for word in line.split())
